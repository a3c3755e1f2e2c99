"""`muster tasks import | publish`: other people's rows into a task set, a task set into what a run
pins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.options import FILE, FOLDER, json_option
from muster.client.printing import print_facts, print_json, printable
from muster.protocol.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from muster.tasks.importing import Imported

MADE, FAMILY, HUB = "set:", "rg:", "hf:"
"""Sources that are no file: an installed maker, a reasoning-gym family, the Hugging Face hub."""


@click.command("import")
@click.argument("sources", nargs=-1, required=True)
@click.option("--out", type=FILE, required=True, help="Receives the task set.")
@click.option("--name", help="The set's name. [default: the first source's]")
@click.option("--version", default="1", help="The set's version. [default: 1]")
@click.option("--count", type=click.IntRange(1), help="Problems of made sets, most of others.")
@click.option(
    "--seed", type=int, default=0, help="Of made sets: same seed, same rows. [default: 0]"
)
@click.option("--split", default="train", help="Of hf: sources. [default: train]")
@click.option("--task-type", help="Task type of rows that state none.")
@click.option("--map", "renamed", multiple=True, metavar="FIELD=COLUMN", help="Where a field is.")
@click.option("--skip-bad", is_flag=True, help="Leave bad rows out instead of refusing them all.")
@json_option
def tasks_import(sources: tuple[str, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Make a task set of JSON lines, Parquet files, saved data sets, families or hub data sets.

    Columns are GENESYS's; dictionaries may be text. Bad rows are named by number and reason.

    \b
    Examples:
      muster tasks import train-0.parquet train-1.parquet --out tasks.jsonl --skip-bad
      muster tasks import set:reverse --count 1000 --out reverse.jsonl
      muster tasks import rg:chain_sum --count 1000 --seed 7 --out sums.jsonl
      muster tasks import hf:gsm8k:main --task-type verifiable_math --map prompt=question \\
          --map gold_standard_solution=answer --out gsm8k.jsonl
    """
    from muster.tasks.importing import Import, import_rows
    from muster.telemetry import setup_logging
    from muster.telemetry.progress import progress

    setup_logging("tasks")
    plan = Import(
        out=out,
        name=options["name"] or default_name(sources[0]),
        version=options["version"],
        columns=columns_of(options["renamed"], options["task_type"]),
        skip_bad=options["skip_bad"],
        limit=options["count"],
    )
    with progress("rows imported") as on_progress:
        rows = _rows(sources, options)
        found = import_rows(rows, plan, lambda done: on_progress(done, 0))
    if as_json:
        print_json(described(found))
    else:
        _print(found, out)
    if found.root is None:
        raise TaskError(
            f"{found.bad} of {found.rows} rows are bad, first row {found.named[0][0]}: "
            f"{found.named[0][1]}",
            hint="mend them, or leave them out with --skip-bad",
        )


def default_name(source: str) -> str:
    """Return what a set is called after its first source."""
    for prefix in (MADE, FAMILY, HUB):
        if source.startswith(prefix):
            return source.removeprefix(prefix)[:128]
    return Path(source).stem[:128] or "tasks"


def columns_of(renamed: tuple[str, ...], task_type: str | None) -> Any:
    """Return where fields are found; raises ConfigError for a mapping that is none."""
    from muster.tasks.rows import FIELDS, Columns

    pairs = dict(part.partition("=")[::2] for part in renamed)
    for name, column in pairs.items():
        if name not in FIELDS or not column:
            raise ConfigError(
                f"--map {name}={column} is not FIELD=COLUMN", hint=f"fields: {', '.join(FIELDS)}"
            )
    return Columns(pairs, {"task_type": task_type} if task_type else {})


def _rows(sources: tuple[str, ...], options: dict[str, Any]) -> Iterator[Any]:
    from muster.tasks.row_files import hub_rows, read_rows

    for source in sources:
        if source.startswith(MADE):
            from muster.tasks.set_makers import maker_of

            count, seed = _size(source, options), options["seed"]
            made = maker_of(source.removeprefix(MADE)).make(count, seed)
            yield from (problem.model_dump() for problem in made)
        elif source.startswith(FAMILY):
            from muster.tasks.reasoning_gym import make_problems

            family = source.removeprefix(FAMILY)
            problems = make_problems(family, _size(source, options), options["seed"])
            yield from (problem.model_dump() for problem in problems)
        elif source.startswith(HUB):
            yield from hub_rows(source.removeprefix(HUB), options["split"])
        else:
            yield from read_rows(Path(source))


def _size(source: str, options: dict[str, Any]) -> int:
    if options["count"] is None:
        raise ConfigError(f"{source} makes any number of problems", hint="say how many: --count N")
    count: int = options["count"]
    return count


def described(found: Imported) -> dict[str, Any]:
    """Return what became of rows as JSON values."""
    return {
        "rows": found.rows,
        "problems": found.problems,
        "repeated": found.repeated,
        "bad": found.bad,
        "bad_rows": [{"row": number, "reason": reason} for number, reason in found.named],
        "reasons": dict(found.reasons),
        "unused_columns": sorted(found.unused),
        "root": None if found.root is None else "0x" + found.root.hex(),
    }


def _print(found: Imported, out: Path) -> None:
    for number, reason in found.named:
        click.echo(printable(f"row {number}: {reason}"), err=True)
    if found.bad > len(found.named):
        click.echo(f"and {found.bad - len(found.named)} more", err=True)
    if found.root is None:
        return
    print_facts(
        {
            "task set": str(out),
            "problems": f"{found.problems:,} of {found.rows:,} rows",
            "repeated": f"{found.repeated:,}" if found.repeated else None,
            "bad": f"{found.bad:,} left out" if found.bad else None,
            "unused": ", ".join(sorted(found.unused)),
            "root": "0x" + found.root.hex(),
        }
    )


@click.command("publish")
@click.argument("task_set", type=FILE)
@click.option("--documents", type=FOLDER, required=True, help="Receives the set, named by root.")
@click.option("--parquet", type=FILE, help="Also write it as Parquet, for other tools.")
@json_option
def tasks_publish(task_set: Path, documents: Path, parquet: Path | None, as_json: bool) -> None:
    """Write a task set as an orchestrator serves it, and say what a run pins.

    Every row is read. `muster run create --documents` writes the same file for its own run.

    \b
    Example:
      muster tasks publish tasks.jsonl --documents documents --parquet tasks.parquet
    """
    from muster.client.task_commands import facts_of
    from muster.tasks import TaskSet, identities
    from muster.tasks.parquet_export import write_parquet
    from muster.telemetry import setup_logging

    setup_logging("tasks")
    opened = TaskSet.open(task_set)
    verifiers = [v.model_dump() for v in identities({problem.task_type for problem in opened})]
    documents.mkdir(parents=True, exist_ok=True)
    document = documents / opened.hash().hex()
    opened.write(document)
    facts = facts_of(opened, document) | {"document": str(document)}
    if parquet is not None:
        write_parquet(opened, parquet)
        facts["parquet"] = str(parquet)
    if as_json:
        print_json(facts | {"verifiers": verifiers})
    else:
        named = [f"{v['task_type']}: {v['name']} {v['version']}" for v in verifiers]
        print_facts(facts | {"verifiers": named})
