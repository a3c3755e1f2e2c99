"""`muster tasks filter`: keep the problems that a model solves sometimes. stdout is data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.settings.options import FILE, FOLDER, chain_options, endpoint
from muster.settings.presets import RECIPE

if TYPE_CHECKING:
    from muster.tasks import TaskSet
    from muster.trainer.offline_filter import Band
    from muster.trainer.pass_records import PassRecord


@click.command("filter")
@click.option("--set", "task_set", type=FILE, required=True, help="The run's problems.")
@click.option("--model", type=FOLDER, required=True, help="Model folder that solves them.")
@click.option(
    "--recipe", type=RECIPE, required=True, help="How it is sampled: TOML file or preset."
)
@click.option(
    "--passes",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Samples per problem.",
)
@click.option(
    "--keep",
    default="0.125:0.5",
    show_default=True,
    metavar="LOW:HIGH",
    help="Pass rates kept.",
)
@click.option("--out", type=FILE, required=True, help="Receives the problems that are kept.")
@click.option("--records", type=FILE, help="Pass rates. [default: OUT.passes.jsonl]")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same samples.")
@click.option(
    "--batch",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="Problems that are sampled together.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Arithmetic of the model.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="CPU threads of the model.",
)
@click.option("--device", default="cpu", show_default=True, help="Where the model computes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tasks_filter(
    task_set: Path, model: Path, recipe: Path, out: Path, records: Path | None, **options: Any
) -> None:
    """Keep the problems that a model solves sometimes. Killed, it goes on where it was.

    \b
    Example:
      muster tasks filter --set tasks.jsonl --model ./model --recipe demo \\
          --passes 8 --keep 0.125:0.5 --out kept.jsonl
    """
    from muster.tasks import TaskSet
    from muster.telemetry import setup_logging
    from muster.telemetry.progress import progress
    from muster.trainer.config import load_recipe
    from muster.trainer.offline_filter import Band, Sampling, kept_set, measure

    band = Band.parse(options["keep"])
    plan = Sampling(
        load_recipe(recipe),
        options["passes"],
        seed=options["seed"],
        batch=options["batch"],
        dtype=options["dtype"],
    )
    problems = TaskSet.open(task_set)
    setup_logging("tasks")

    from muster.inference.transformers_engine import TransformersEngine

    engine = TransformersEngine(
        options["dtype"], threads=options["threads"], device=options["device"]
    )
    target = records or out.with_name(f"{out.name}.passes.jsonl")
    with progress("problems measured") as on_progress:
        found = measure(problems, engine, model, plan, records=target, on_progress=on_progress)
    kept = kept_set(problems, found, band)
    kept.write(out)
    counts = counts_of(problems, kept, found, band)
    click.echo(json.dumps(counts) if options["as_json"] else _sentence(counts, out))


def counts_of(
    problems: TaskSet, kept: TaskSet, found: Sequence[PassRecord], band: Band
) -> dict[str, int]:
    """Return how many problems were kept, and why the others were not."""
    return {
        "problems": len(problems),
        "kept": len(kept),
        "too_hard": sum(r.rate is not None and r.rate < band.low for r in found),
        "too_easy": sum(r.rate is not None and r.rate > band.high for r in found),
        "undecided": sum(r.rate is None for r in found),
    }


def _sentence(counts: dict[str, int], out: Path) -> str:
    return (
        f"{counts['kept']} of {counts['problems']} problems kept in {out}; {counts['too_hard']} "
        f"too hard, {counts['too_easy']} too easy, {counts['undecided']} could not be graded"
    )


@click.command("filter-run")
@click.option("--run", type=int, required=True, help="Run whose accepted rollouts are counted.")
@click.option("--set", "task_set", type=FILE, required=True, help="The run's problems.")
@click.option("--files", type=FOLDER, required=True, help="The orchestrator's files folder.")
@click.option(
    "--policy-version", type=click.IntRange(0), default=0, help="Whose rollouts. [default: 0]"
)
@click.option(
    "--passes", type=click.IntRange(1, 1024), default=8, help="Least samples. [default: 8]"
)
@click.option(
    "--keep", default="0.125:0.5", metavar="LOW:HIGH", help="Pass rates kept. [default: 0.125:0.5]"
)
@click.option("--out", type=FILE, required=True, help="Receives the problems that are kept.")
@click.option("--records", type=FILE, help="Pass rates. [default: OUT.passes.jsonl]")
@chain_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tasks_filter_run(
    task_set: Path, out: Path, records: Path | None, as_json: bool, **options: Any
) -> None:
    """Keep the problems that a run's workers solved sometimes, as its validators accepted it.

    What counts is read from the chain; every file is compared with its hash there. Problems with
    fewer samples than --passes are left out. Later, with more files, the same command says more.

    \b
    Example:
      muster tasks filter-run --run 1 --set tasks.jsonl --files files --out kept.jsonl
    """
    import asyncio

    from muster.protocol.ids import PolicyVersion
    from muster.tasks import TaskSet
    from muster.telemetry import setup_logging
    from muster.telemetry.progress import progress
    from muster.trainer.offline_filter import Band, kept_set
    from muster.trainer.run_passes import count_passes, pass_records, read_run, write_records

    band = Band.parse(options["keep"])
    version = PolicyVersion(options["policy_version"])
    problems = TaskSet.open(task_set)
    setup_logging("tasks")
    run, accepted = asyncio.run(read_run(*endpoint(options), options["run"]))
    with progress("files counted") as on_progress:
        passes = count_passes(accepted, version, options["files"], on_progress)
    found = pass_records(problems, passes, run, version, least=options["passes"])
    write_records(records or out.with_name(f"{out.name}.passes.jsonl"), found, run, version)
    kept = kept_set(problems, found, band)
    kept.write(out)
    counts = counts_of(problems, kept, found, band)
    counts |= {"files": passes.files, "missing_files": passes.missing}
    click.echo(json.dumps(counts) if as_json else _sentence(counts, out))
