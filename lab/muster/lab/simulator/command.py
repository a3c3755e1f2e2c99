"""`muster simulate`: plays a network in virtual time, and prints its cost and its invariants."""

import logging
import re
from pathlib import Path
from typing import Any

import click

from muster.client.cli.options import FILE, json_option
from muster.client.cli.printing import print_facts, print_json, print_table
from muster.protocol.errors import ConfigError

CHAOS: dict[str, Any] = {
    "loss": 0.02,
    "churn_s": 120.0,
    "disk_full_s": 90.0,
    "outage_s": 60.0,
    "reorganise_s": 60.0,
    "skew_s": 3,
    "relay_failures": 0.05,
}
"""Values of `Scenario` that `--chaos` sets."""


@click.command()
@click.option("--workers", type=click.IntRange(1, 20_000), default=8, help="Workers.")
@click.option(
    "--validators",
    type=click.IntRange(1, 500),
    default=4,
    help="Validators; at most 88 have seats.",
)
@click.option("--quorum", type=click.IntRange(1, 88), default=2, help="Validators that must agree.")
@click.option(
    "--cheats", metavar="KIND=N,...", default="", help="Workers that cheat: forger=1,liar=1."
)
@click.option(
    "--judges",
    metavar="KIND=N,...",
    default="",
    help="Bad validators: lazy=1, colluding=1 or accusing=1.",
)
@click.option("--disputes", "has_disputes", is_flag=True, help="Let owners dispute verdicts.")
@click.option("--seconds", type=float, default=300.0, help="Simulated seconds.")
@click.option("--seed", type=int, default=0, help="Same seed, same history.")
@click.option(
    "--chaos", is_flag=True, help="Add loss, churn, outages, full disks, reorganisations."
)
@click.option(
    "--coalitions", is_flag=True, help="Bribe more and more jurors; print what breaks when."
)
@click.option("--history", type=FILE, help="Write one line per event to this file.")
@click.option("--verbose", is_flag=True, help="Show what the programs log.")
@json_option
def simulate(
    cheats: str, judges: str, chaos: bool, coalitions: bool, history: Path | None, verbose: bool,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Simulate a network on the production programs, in virtual time, and check its invariants.

    \b
    Examples:
      muster simulate --workers 20 --validators 5 --cheats forger=2,liar=1 --seed 7
      muster simulate --chaos --judges colluding=1 --validators 5 --json
      muster simulate --coalitions --workers 10000 --validators 9 --quorum 5
    """
    _require_quorum(options["quorum"], options["validators"])
    if coalitions:
        _print_coalitions(options, as_json=as_json)
        return
    from muster.lab.simulator.figures import figures_of
    from muster.lab.simulator.invariants import hold
    from muster.lab.simulator.network import simulate as play
    from muster.lab.simulator.scenario import Scenario

    if not verbose:
        logging.disable(logging.CRITICAL)
    options["duration_s"] = options.pop("seconds")
    scenario = Scenario(
        **options,
        **(CHAOS if chaos else {}),
        conduct=_kinds(cheats, ("forger", "liar")),
        judging=_kinds(judges, ("lazy", "colluding", "accusing")),
        submissions_per_step=max(options["workers"], 4),
    )
    world = play(scenario, hold)
    if history is not None:
        history.write_text("\n".join(world.history) + "\n")
    figures = figures_of(world)
    if as_json:
        print_json(figures)
    else:
        print_facts(_facts(figures))


CASES = 1000
"""Cases of each promise at each share of the bench."""


def _print_coalitions(options: dict[str, Any], *, as_json: bool) -> None:
    from muster.lab.simulator.coalitions import BENCH, MOSTLY, RARELY, play_all
    from muster.lab.simulator.scenario import Scenario, fixed

    asked = {name: options[name] for name in ("workers", "validators", "quorum", "seed")}
    found, least = play_all(**asked, cases=min(CASES, options["workers"]), fixed=fixed(Scenario()))
    if as_json:
        promises = [
            {
                "promise": each.promise.name,
                "needs": each.promise.needs,
                "breaks_from": each.breaks_from(RARELY),
                "mostly_from": each.breaks_from(MOSTLY),
                "rates": {f"{share:.2f}": rate for share, rate in each.rates.items()},
            }
            for each in found
        ]
        print_json({**asked, "bench": BENCH, "quorum_share": least, "promises": promises})
        return
    print_facts(
        {
            "network": f"{asked['workers']:,} workers of two runs, {asked['validators']} "
            f"validators, a bench of {BENCH}",
            "quorum": f"outcomes are recorded from {least:.0%} of the run's validators on",
            "another run": "no coalition of one run took any stake of the other",
        }
    )
    columns = ("promise", "needs besides", "breaks from", "mostly from")
    rows = [
        [
            each.promise.name,
            each.promise.needs,
            *map(_share, map(each.breaks_from, (RARELY, MOSTLY))),
        ]
        for each in found
    ]
    print_table(columns, rows)


def _share(value: float | None) -> str:
    return "never" if value is None else f"{value:.0%} of the bench"


def _require_quorum(quorum: int, validators: int) -> None:
    if quorum > validators:
        raise ConfigError(
            f"a quorum of {quorum} of {validators} validators is impossible",
            hint="lower --quorum or raise --validators",
        )


def _kinds(text: str, known: tuple[str, ...]) -> Any:
    """Return the kinds and numbers in a text such as `forger=2,liar=1`."""
    found = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\w+)=(\d+)", part)
        if match is None or match[1] not in known:
            raise ConfigError(
                f"{part!r} is not a kind with its number",
                hint=f"use {', '.join(f'{k}=N' for k in known)}",
            )
        found.append((match[1], int(match[2])))
    return tuple(found)


def _facts(figures: dict[str, Any]) -> dict[str, Any]:
    load, verdicts = figures["validators_load"], figures["verdicts"]
    return {
        "network": f"{figures['workers']} workers, {figures['validators']} validators, quorum "
        f"{figures['quorum']}, seed {figures['seed']}, {figures['virtual_s']:g} virtual seconds",
        "submissions": f"{figures['submissions']}: "
        + ", ".join(f"{count} {name}" for name, count in verdicts.items() if count),
        "to verdict": _spread(figures["to_verdict_s"]),
        "to payable": _spread(figures["to_payable_s"]),
        "messages": f"{figures['messages_per_submission']:g} per submission: "
        + ", ".join(f"{count} {name}" for name, count in figures["messages"].items()),
        "chain": f"{figures['gas_per_submission']:,.0f} gas per submission: "
        + ", ".join(f"{count} {name}" for name, count in figures["transactions"].items())
        + f"; {figures['reorganisations']} reorganisations",
        "validators": f"{load['checks_per_submission']:g} checks per submission, "
        f"{load['checks_mean']:g} each (most {load['checks_max']}), busy {load['busy_mean']:.1%} "
        f"(most {load['busy_max']:.1%})",
        "slashed": f"{figures['slashed']:g} tokens",
        "processor": ", ".join(f"{name} {s:g} s" for name, s in figures["cpu_s"].items() if s),
        "history": figures["digest"],
        "invariants": "held: stake conserved, nobody paid twice, nobody honest slashed, every "
        "slash judged again, replay equals state",
    }


def _spread(values: dict[str, float]) -> str | None:
    if not values:
        return None
    return f"{values['median']:g} s median, {values['p95']:g} s for 95 %, {values['max']:g} s most"
