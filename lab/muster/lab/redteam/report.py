"""The report of a red team run: a table in the terminal, a page, drawings.

It can also read the page's table back, so that a test can compare the page with the record.
"""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.lab.redteam import byruns
from muster.lab.redteam.catalogue import ELSEWHERE
from muster.lab.redteam.gain import Terms
from muster.lab.redteam.honest import HonestResult
from muster.lab.redteam.hostile import catalogue
from muster.lab.redteam.trials import MOST_PROFIT, AttackResult

if TYPE_CHECKING:
    from rich.table import Table

PAGE = Path("docs/security/red-team.md")
IMAGES = Path("docs/images")
HEAD = """\
# Red team

Every attack of the catalogue as a program, and how often its defence held. Made by
`muster redteam --full`; do not edit. Commit `{commit}`, {date}, {machine}.

A trial is one act of cheating from beginning to verdict, drawn anew: the real worker, relay, chain
or client with one hook overridden, against the real checks. The run is that of `make demo`: its
recipe, its 0.1M-parameter model in float32, its calibration. Limits and rates for another model are
that model's calibration; the programs are the same.

A full run plans 300 trials of a hard attack, all of its ways together, and 80 of each way of a
statistical one that pays; the tables say how many were played, and the intervals what that proves.

"Caught" means found by the defence named, for its reason. A hard attack must be caught each time, a
statistical one in 95 of 100 submissions in each way that pays. An economic one need not be caught,
it must not pay: a coalition of 40 % of the validators gets a forgery through now and then, and
loses more than all of them the other times. "Found after" counts what the attack got away with, the
one that was found included. "Profit" is that of a cheated unit over an honest one, in prices of a
unit: measured, or that of the gain model (`redteam/gain.py`) at the share caught.

A profit of 0 is the floor of what is refused but not slashed. Who delivers late, twice, in another
encoding, with an old key, with a withheld file or beyond its stake (A8, A11, A28, A33, A39), or
leaves in time with what it never earned (A27), has saved the cost of a unit and is not paid for it;
honest work that costs all it earns brings the same. Wherever honest work earns more than it costs,
the figure is below zero by that much. No stake is taken there because honest workers are late, send
twice and lose files, too, and nobody may cost them a stake by it. A23 and A26 are measured: what is
split, or accused, brings exactly nothing more.

The run's terms: price {price:g} tokens a unit, stake {stake:g} tokens, {share:g} % of it slashed
for a fraud, up to {units} units a submission, every submission judged before it is paid (audit rate
{audited:g}), honest work that costs all it earns.

What tests each beside this is in [security.md](../security.md). Contracts' trials are fuzz runs of
`contracts/test/unit/Attacks*.t.sol`.
"""
HONEST = """\
## Honest work (A36)

{rollouts:,} honest rollouts, each generated anew on a ticket that calibration never saw, in {cells}
cells: one way of a worker before one way of a validator. A submission is judged by up to three
validators that compute differently, {judgements:,} judgements of rollouts in all; a rollout counts
once, and as rejected when any of them takes it for dishonest. {rejected} rejected, {slashed}
submissions that would have been slashed. Upper 95 % bound of the share rejected (Clopper-Pearson,
over rollouts generated): {upper:.2e}.

Ways are crossed within float32, within bfloat16 and across both. Where vLLM is installed (its CPU
build), what it generates or judges is crossed with every way of transformers: within float32 and
within bfloat16 in three ways of vLLM, and in one way in a run that covers all four engines. Each
run has limits of its own calibration. Workers that compute fewer samples together than a submission
has admit others as some end; prompts of several lengths (sorting 2 to 5 digits) make them pad.

Not covered: no GPU was measured, neither its kernels nor a mixture of GPUs and CPUs, and no other
model than this one. A run admits the engines that its calibration has measured, on the machines
that it ran on, and that calibration's limits decide, not these figures. Prompts are short: errors
that grow with length are the calibration's to find, on the run's own prompts.

| dimension | | rollouts generated so | judgements made so |
|---|---|---|---|"""
VARIANTS = """\
## Every way

Ways in brackets are for the record: nothing is gained there, or they are honest twins that must
pass. Harmless trials delivered what honest work would have. "s" is the mean time from the
commitment to the outcome on chain, in seconds, where there is a chain.

| | way | trials | caught | 95 % interval | harmless | s | reasons |
|---|---|---|---|---|---|---|---|"""
PROFITS = """\
## What economic attacks bring

Prices of a unit, over honest work, of all trials that measure a profit. What must hold is that the
interval's upper end is no more than {most:g}. A13 draws its problems anew under a beacon that
nobody knew: its expectation is zero, its mean is that up to the interval.

| | attack | measured | mean profit | 95 % interval |
|---|---|---|---|---|"""
MAIN = """\
## Attacks

| | attack | defence | kind | trials | caught | 95 % interval | found after | profit | holds |
|---|---|---|---|---|---|---|---|---|---|"""
DRAWN = ("A1", "A2", "A4", "A5", "A15", "A22")
"""Attacks with a knob, drawn as curves."""


def make_table(results: Sequence[AttackResult]) -> Table:
    """Return results as a table for the terminal."""
    from rich.table import Table

    table = Table(title="Red team", title_justify="left")
    table.add_column("", no_wrap=True, min_width=3)
    table.add_column("attack", no_wrap=True, max_width=34)
    for name, width in (("trials", 6), ("caught", 6), ("at least", 8), ("profit", 8)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    table.add_column("found after", no_wrap=True, min_width=12)
    for r in results:
        trials, caught, _, after, profit = _figures(r)
        low = f"{r.interval[0]:.1%}"
        table.add_row(
            r.attack.id, r.attack.title, trials, caught, low, profit, after,
            style="red" if r.failure else None,
        )  # fmt: skip
    return table


def _figures(r: AttackResult) -> tuple[str, str, str, str, str]:
    low, high = r.interval
    return (
        str(r.trials),
        str(r.caught),
        f"{low:.1%} to {high:.1%}",
        f"{r.found_after:.2g} {r.attack.time_unit}{'s' if _is_plural(r) else ''}",
        f"{r.profit + 0.0:+.3g}",
    )


def _is_plural(r: AttackResult) -> bool:
    return r.attack.time_unit != "s" and round(r.found_after, 6) != 1


@dataclass(frozen=True, slots=True)
class Run:
    """Where and when a full run was made."""

    machine: str
    """The machine that it ran on."""
    date: str
    """Date of the run."""
    commit: str
    """Commit of the code, as git names it."""
    terms: Terms
    """The run's terms, for the profits."""


def code() -> str:
    """Return this checkout's commit, as git names it; call it before a run writes files."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def this_run(terms: Terms, machine: str, commit: str) -> Run:
    """Return today's run of a commit."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Run(machine, date, commit, terms)


def write_page(
    path: Path, results: Sequence[AttackResult], honest: HonestResult | None, run: Run
) -> None:
    """Write the page of a full run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [_head(run), _main_table(results), _profits(results), _honest_part(honest),
             _curves(results), _variants(results), byruns.table(), catalogue.table(),
             _elsewhere()]  # fmt: skip
    path.write_text("\n".join(parts))


def _head(run: Run) -> str:
    t = run.terms
    return HEAD.format(
        commit=run.commit, date=run.date, machine=run.machine, units=t.units,
        price=t.price_wei / 1e18, stake=t.stake_wei / 1e18, share=t.fraud_ppm / 1e4,
        audited=t.audit_rate,
    )  # fmt: skip


def _main_table(results: Sequence[AttackResult]) -> str:
    lines = [MAIN]
    for r in results:
        a = r.attack
        lines.append(
            f"| {a.id} | {a.title} | {a.defence} | {a.kind} | {' | '.join(_figures(r))} | "
            f"{r.failure or 'yes'} |"
        )
    return "\n".join(lines) + "\n"


def _profits(results: Sequence[AttackResult]) -> str:
    lines = [PROFITS.format(most=MOST_PROFIT)]
    for r in results:
        if r.attack.kind == "economic":
            low, high = r.profit_interval
            lines.append(
                f"| {r.attack.id} | {r.attack.title} | {r.measured} | {r.profit + 0.0:+.3g} | "
                f"{low + 0.0:+.3g} to {high + 0.0:+.3g} |"
            )
    return "\n".join(lines) + "\n"


def _honest_part(honest: HonestResult | None) -> str:
    if honest is None:
        return "## Honest work (A36)\n\nNot measured in this run.\n"
    said = HONEST.format(
        rollouts=honest.rollouts, cells=honest.cells, rejected=honest.rejected,
        slashed=honest.slashed, upper=honest.false_positive_upper, judgements=honest.judgements,
    )  # fmt: skip
    # A cell is empty if workers, or validators, have no such value.
    rows = [
        f"| {m.dimension} | {m.value} | {_count(m.rollouts)} | {_count(m.judgements)} |"
        for m in honest.margins
    ]
    return "\n".join([said, *rows]) + "\n"


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _curves(results: Sequence[AttackResult]) -> str:
    drawn = [r.attack for r in results if r.attack.id in DRAWN]
    lines = ["## Power against the knob", ""]
    lines += [f"![{a.id}: {a.title}](../images/redteam-{a.id}.svg)" for a in drawn]
    return "\n".join(lines) + "\n"


def _variants(results: Sequence[AttackResult]) -> str:
    lines = [VARIANTS]
    for r in results:
        for v in r.by_variant:
            low, high = v.interval
            name = v.variant.name
            if v.variant.must_pass or not v.variant.must_catch:
                name = f"({name})"
            lines.append(
                f"| {r.attack.id} | {name} | {v.trials} | {v.caught} | {low:.1%} to {high:.1%} | "
                f"{v.harmless} | {'' if v.seconds is None else f'{v.seconds:.1f}'} | "
                f"{', '.join(v.reasons)} |"
            )
    return "\n".join(lines) + "\n"


def _elsewhere() -> str:
    lines = ["## Not played", "", "| | attack | why |", "|---|---|---|"]
    lines += [f"| {e.id} | {e.title} | {e.reason} |" for e in ELSEWHERE]
    return "\n".join(lines) + "\n"


def draw_curves(results: Sequence[AttackResult], folder: Path = IMAGES) -> list[Path]:
    """Draw detection against the knob of every attack that has one; return the files."""
    return [
        _draw(r, folder / f"redteam-{r.attack.id}.svg") for r in results if r.attack.id in DRAWN
    ]


def _draw(result: AttackResult, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "muster"
    from matplotlib import pyplot

    points = [v for v in result.by_variant if v.variant.level is not None and v.trials]
    levels = [float(v.variant.level or 0) for v in points]
    shares = [v.caught / v.trials for v in points]
    below = [s - v.interval[0] for s, v in zip(shares, points, strict=True)]
    above = [v.interval[1] - s for s, v in zip(shares, points, strict=True)]
    figure, axes = pyplot.subplots(figsize=(6, 3.2))
    axes.errorbar(levels, shares, yerr=[below, above], fmt="o-", capsize=3, color="#4c72b0")
    if max(levels) > 50 * max(min(levels), 1e-12):
        axes.set_xscale("symlog" if min(levels) <= 0 else "log")
    axes.set(xlabel=result.attack.knob, ylabel="submissions noticed", ylim=(-0.03, 1.03))
    axes.set_title(f"{result.attack.id}: {result.attack.title}", fontsize=9)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
