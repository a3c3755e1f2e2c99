"""`muster tasks check`: whether a run may rely on a task set and on what grades it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.options import FILE, json_option
from muster.client.printing import print_json, print_table

if TYPE_CHECKING:
    from muster.tasks.admission import Admission


@click.command("check")
@click.argument("task_set", type=FILE)
@click.option(
    "--sample",
    type=click.IntRange(1, 10**9),
    default=256,
    help="Problems that are graded, spread over the set. [default: 256]",
)
@click.option("--all", "everything", is_flag=True, help="Grade every problem.")
@click.option(
    "--hacked",
    type=click.IntRange(0, 10**6),
    default=4,
    help="Problems of each type that meet the known hacks. [default: 4]",
)
@click.option("--allow-judge", is_flag=True, help="Accept grades that cannot be replayed.")
@json_option
def tasks_check(
    task_set: Path,
    sample: int,
    everything: bool,
    hacked: int,
    allow_judge: bool,
    as_json: bool,
) -> None:
    """Try a task set and its verifiers as strangers will; exit code 1 refuses them.

    Every row is read. Of the sample, gold answers must score 1, junk and known hacks 0, in two
    processes alike, within bounds of time and memory.

    \b
    Examples:
      muster tasks check tasks.jsonl
      muster tasks check tasks.jsonl --all --json
    """
    from muster.tasks import TaskSet
    from muster.tasks.admission import Trial, admit
    from muster.telemetry import setup_logging
    from muster.telemetry.progress import progress

    setup_logging("tasks")
    opened = TaskSet.open(task_set)
    trial = Trial(len(opened) if everything else sample, hacked, allow_judge)
    with progress("problems checked") as on_progress:
        found = admit(opened, trial, on_progress)
    if as_json:
        print_json(described(found) | {"root": "0x" + opened.hash().hex()})
    else:
        _print(found)
    if not found.is_admitted:
        sys.exit(1)


def described(found: Admission) -> dict[str, Any]:
    """Return a report as JSON values."""
    return {
        "admitted": found.is_admitted,
        "problems": found.problems,
        "tried": found.tried,
        "gradings": found.gradings,
        "hacks": found.hacks,
        "without_gold": found.without_gold,
        "task_types": dict(found.task_types),
        "offences": {
            reason: {"count": o.count, "problem_ids": o.problem_ids, "detail": o.detail}
            for reason, o in found.offences.items()
        },
    }


def _print(found: Admission) -> None:
    kinds = ", ".join(f"{count:,} {name}" for name, count in found.task_types.most_common())
    click.echo(f"{found.problems:,} problems: {kinds}")
    click.echo(
        f"{found.tried:,} tried by {found.gradings:,} gradings, {found.hacks:,} known hacks; "
        f"{found.without_gold:,} have no known right answer"
    )
    if found.is_admitted:
        click.echo("admitted")
        return
    click.echo()
    columns = ("refused because", "count", "first problems", "found")
    rows = [
        [reason, f"{o.count:,}", " ".join(o.problem_ids), o.detail]
        for reason, o in found.offences.items()
    ]
    print_table(columns, rows)
