"""`muster redteam`: play the attacks against this software's defences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from muster.protocol.errors import ConfigError

if TYPE_CHECKING:
    from muster.lab.redteam.honest import HonestResult
    from muster.lab.redteam.runner import Progress
    from muster.lab.redteam.stage import Stage
    from muster.lab.redteam.trials import Attack, AttackResult

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--list", "list_only", is_flag=True, help="Print the catalogue of attacks and exit.")
@click.option(
    "--attack", "chosen", multiple=True, metavar="A6", help="Play only this attack; repeatable."
)
@click.option("--trials", type=click.IntRange(min=1), help="Trials of each attack.")
@click.option(
    "--full", is_flag=True, help="Play hundreds of trials and honest work; write page and drawings."
)
@click.option(
    "--honest",
    type=click.IntRange(min=0),
    help="Honest rollouts to check. [default: 30000 with --full]",
)
@click.option(
    "--hostile", is_flag=True, help="Check only that honest nodes are served under attack."
)
@click.option("--json", "record", type=FILE, help="Write a JSON line per trial to this file.")
@click.option(
    "--resume", is_flag=True, help="Skip the trials that the file of --json already holds."
)
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option(
    "--folder", type=FOLDER, default=Path("runs/redteam"), show_default=True,
    help="Folder for policy and calibrations.",
)  # fmt: skip
@click.option("--page", type=FILE, help="Page to write. [default: docs' own with --full]")
def redteam(
    list_only: bool,
    chosen: tuple[str, ...],
    trials: int | None,
    full: bool,
    honest: int | None,
    hostile: bool,
    record: Path | None,
    resume: bool,
    seed: int,
    folder: Path,
    page: Path | None,
) -> None:
    """Play every attack of the catalogue against the defences, and say which held.

    Runs in the project's folder. Exit code 1 when a defence fails.

    \b
    Examples:
      muster redteam                      a few trials of each, about a minute
      muster redteam --attack A6 --trials 300
      muster redteam --hostile            a network under attack, two minutes
      muster redteam --full --json runs/redteam/trials.jsonl --resume
    """
    if list_only:
        _list()
        return
    if hostile:
        _serve_under_attack(seed)
        return
    attacks = _chosen(chosen)
    if resume and record is None:
        raise click.UsageError("--resume needs --json FILE, the record of the earlier trials")
    from muster.lab.redteam import byruns
    from muster.lab.redteam.report import PAGE, code, draw_curves, this_run, write_page
    from muster.lab.redteam.runner import failures, read_trials, run
    from muster.lab.redteam.stage import machine

    commit = code()
    earlier = read_trials(record) if resume and record else []
    with _stage(folder) as stage, _recording(record, resume) as lines, _progress() as progress:
        results = run(
            stage, attacks, size="full" if full else "fast", trials=trials, seed=seed,
            earlier=earlier, record=lines, progress=progress,
        )  # fmt: skip
        wanted = honest if honest is not None else (30_000 if full and not chosen else 0)
        honest_result = _honest(stage, wanted, record, resume, lines) if wanted else None
        terms = stage.terms
    _show(results, honest_result)
    if full and not chosen:
        draw_curves(results)
        write_page(page or PAGE, results, honest_result, this_run(terms, machine(), commit))
    elif page:
        write_page(page, results, honest_result, this_run(terms, machine(), commit))
    failed = failures(results)
    if not chosen:
        held = byruns.play()
        failed += byruns.failures(held)
        click.echo(f"a hostile second run: {sum(held.values())} of {len(held)} attacks fail")
    if honest_result is not None and honest_result.slashed:
        failed.append(f"A36: {honest_result.slashed} honest submissions would be slashed")
    if failed:
        raise ConfigError(
            "; ".join(failed), hint="play one trial again from its line in the file of --json"
        )


def _list() -> None:
    from muster.lab.redteam.byruns import PLAYS
    from muster.lab.redteam.catalogue import ATTACKS, ELSEWHERE

    for attack in ATTACKS.values():
        click.echo(f"{attack.id:4} {attack.kind:12} {attack.title}")
        click.echo(f"     {'':12} {attack.defence}")
    for play in PLAYS:
        click.echo(f"R{play.number:<3} {'by a run':12} {play.title}")
        click.echo(f"     {'':12} {play.now}")
    for entry in ELSEWHERE:
        click.echo(f"{entry.id:4} {'not played':12} {entry.title}: {entry.reason}")


def _serve_under_attack(seed: int) -> None:
    import asyncio
    import tempfile

    from muster.lab.redteam.hostile.network import SECONDS, SERVED, play
    from muster.lab.redteam.hostile.together import attack

    with tempfile.TemporaryDirectory() as folder:
        story = asyncio.run(play(Path(folder), attack, seconds=SECONDS, seed=seed))
    for name, phase in (("alone", story.calm), ("attacked", story.attacked)):
        click.echo(
            f"{name:9} {phase.served_min:.2%} of the honest requests served, 99 of 100 within "
            f"{phase.p99_ms_max:.0f} ms; {phase.judged} submissions judged in {SECONDS:.0f} s"
        )
    if story.attacked.served_min < SERVED:
        raise ConfigError(
            f"{1 - story.attacked.served_min:.2%} of the honest requests failed under attack",
            hint="run make bench-hostile to see the answers that the attackers got",
        )


def _chosen(names: tuple[str, ...]) -> list[Attack]:
    from muster.lab.redteam.catalogue import ATTACKS

    unknown = [name for name in names if name.upper() not in ATTACKS]
    if unknown:
        raise click.UsageError(f"there is no attack {unknown[0]!r}: see muster redteam --list")
    return [ATTACKS[name.upper()] for name in names] or list(ATTACKS.values())


@contextlib.contextmanager
def _stage(folder: Path) -> Iterator[Stage]:
    import logging

    import torch

    from muster.lab.redteam.stage import Stage

    # Attacked parts log warnings, as they should; these are hidden.
    logging.getLogger("muster").setLevel(logging.CRITICAL)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(folder)
    try:
        yield stage
    finally:
        stage.close()


@contextlib.contextmanager
def _recording(record: Path | None, resume: bool) -> Iterator[IO[str] | None]:
    if record is None:
        yield None
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a" if resume else "w", buffering=1) as lines:
        yield lines


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def tell(attack: Attack, done: int, total: int) -> None:
            if attack.id not in tasks:
                tasks[attack.id] = bars.add_task(f"{attack.id} {attack.title[:48]}", total=total)
            bars.update(tasks[attack.id], completed=done, total=total, visible=done < total)  # type: ignore[arg-type]

        yield tell


def _honest(
    stage: Stage, rollouts: int, record: Path | None, resume: bool, lines: IO[str] | None
) -> HonestResult:
    import json

    from muster.lab.redteam.honest import conclude_honest, play_honest, read_judged

    done = read_judged(record) if resume and record else []
    judged = list(done)
    for one in play_honest(stage, rollouts, done=done):
        judged.append(one)
        if lines is not None:
            lines.write(json.dumps(one.line()) + "\n")
    return conclude_honest(judged)


def _show(results: list[AttackResult], honest: HonestResult | None) -> None:
    from rich.console import Console

    from muster.lab.redteam.report import make_table

    Console().print(make_table(results))
    if honest is not None:
        click.echo(
            f"honest: {honest.rejected} of {honest.rollouts} rollouts rejected in "
            f"{honest.cells} cells, rate below {honest.false_positive_upper:.1e}"
        )
