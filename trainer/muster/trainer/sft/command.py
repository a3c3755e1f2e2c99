"""`muster trainer sft` and `muster trainer lineage`; everything heavy is imported when they run."""

from pathlib import Path
from typing import Any

import click

from muster.settings.flags import FILE, FOLDER, SectionedCommand
from muster.trainer.options import context_option, dtype_option, memory_options

SECTIONS = {
    "What is made of what": ["data", "model", "recipe", "out", "state_dir", "save_every"],
    "Computing": [
        *("device", "threads", "compute_dtype", "micro_batch_tokens", "recompute"),
        *("optimizer_state", "offload", "memory_gb", "rank_timeout_s", "context_ranks"),
    ],
    "Measuring": ["eval_set", "eval_every", "eval_samples"],
}
DATA = click.Path(exists=True, path_type=Path)


@click.command("sft", cls=SectionedCommand, sections=SECTIONS)
@click.option("--data", type=DATA, required=True, help="Data set: a folder or a file.")
@click.option("--model", type=FOLDER, required=True, help="Base model.")
@click.option("--recipe", type=FILE, required=True, help="SFT recipe, a TOML file.")
@click.option("--out", type=FOLDER, required=True, help="Folder to write the model to.")
@click.option("--state-dir", type=FOLDER, help="Folder of state and figures. [default: OUT-state]")
@click.option(
    "--save-every", type=click.IntRange(1), default=100, help="Steps between checkpoints."
)
@click.option("--eval-set", type=FILE, help="Task set of held-out problems.")
@click.option(
    "--eval-every", type=click.IntRange(0), default=0, help="Also evaluate every N steps."
)
@click.option(
    "--eval-samples",
    type=click.IntRange(1, 1024),
    default=1,
    help="Samples per held-out problem.",
)
@click.option("--device", default="cpu", help="Where the model computes.")
@click.option("--threads", type=click.IntRange(1, 256), default=1, help="CPU threads.")
@click.option(
    "--rank-timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    help="Under torchrun: deadline for other ranks.",
)
@context_option
@dtype_option
@memory_options
def sft(recipe: Path, out: Path, state_dir: Path | None, **options: Any) -> None:
    """Fine-tune a model on a data set; prints the folder of a base model for `run create`.

    After a kill the same command resumes, to the same bytes. The folder holds the model's lineage.

    \b
    Example:
      muster trainer sft --data ./traces --model ./base --recipe sft.toml \\
          --out ./student
    """
    from muster.telemetry import setup_logging
    from muster.trainer.config import load_sft_recipe
    from muster.trainer.learn.memory_plan import MemoryChoices
    from muster.trainer.sft.flow import fine_tune
    from muster.trainer.sft.job import TuningJob

    setup_logging("sft")
    of_memory = (
        *("device", "compute_dtype", "micro_batch_tokens", "recompute", "optimizer_state"),
        *("offload", "memory_gb", "context_ranks"),
    )
    given = {name: options.pop(name) for name in of_memory}
    choices = MemoryChoices(
        **{name: value for name, value in given.items() if value is not None},
        evaluates=options["eval_set"] is not None,
    )
    job = TuningJob(
        recipe=load_sft_recipe(recipe),
        out=out,
        state_dir=state_dir or out.with_name(f"{out.name}-state"),
        choices=choices,
        **options,
    )
    made = fine_tune(job)
    if made is not None:
        click.echo(made)


@click.command("lineage")
@click.argument("folder", type=FOLDER)
@click.option("--data", type=DATA, help="Data set: a folder or a file.")
@click.option("--model", type=FOLDER, help="Base model of FOLDER's model.")
def lineage(folder: Path, data: Path | None, model: Path | None) -> None:
    """Say which data set FOLDER's model was trained on; check --data and --model against it.

    Exits with 1 when a check against the lineage fails.

    \b
    Example:
      muster trainer lineage ./student --data ./traces --model ./base
    """
    from muster.protocol.errors import StorageError
    from muster.trainer.sft.lineage import check_lineage, describe_base

    found = list(check_lineage(folder, data=data, base=model))
    click.echo(describe_base(folder))
    for check in found:
        click.echo(f"{check.verdict:<6}{check.name}: {check.said}")
    wrong = [check.name for check in found if check.verdict == "wrong"]
    if wrong:
        raise StorageError(f"{folder} differs from its lineage in: {', '.join(wrong)}")
