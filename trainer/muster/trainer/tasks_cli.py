"""`muster tasks filter`: keep the problems that a model solves sometimes. stdout is data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("filter")
@click.option("--set", "task_set", type=FILE, required=True, help="The problems.")
@click.option("--model", type=FOLDER, required=True, help="Model folder that solves them.")
@click.option("--recipe", type=FILE, required=True, help="Recipe, TOML: how it is sampled.")
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
    help="Pass rates that are kept.",
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
    help="Number format of the model.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="CPU threads of the model.",
)
@click.option("--device", default="cpu", show_default=True, help="Where it computes.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def tasks_filter(
    task_set: Path, model: Path, recipe: Path, out: Path, records: Path | None, **options: Any
) -> None:
    """Keep the problems that a model solves sometimes. Killed, it goes on where it was.

    \b
    Example:
      muster tasks filter --set tasks.jsonl --model ./model --recipe configs/demo.toml \\
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
    counts = {
        "problems": len(problems),
        "kept": len(kept),
        "too_hard": sum(r.rate is not None and r.rate < band.low for r in found),
        "too_easy": sum(r.rate is not None and r.rate > band.high for r in found),
        "undecided": sum(r.rate is None for r in found),
    }
    click.echo(json.dumps(counts) if options["as_json"] else _sentence(counts, out))


def _sentence(counts: dict[str, int], out: Path) -> str:
    return (
        f"{counts['kept']} of {counts['problems']} problems kept in {out}; {counts['too_hard']} "
        f"too hard, {counts['too_easy']} too easy, {counts['undecided']} could not be graded"
    )
