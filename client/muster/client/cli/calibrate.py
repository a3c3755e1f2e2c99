"""`muster calibrate`: measure the limits inside which validators take work for honest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from muster.client.cli.options import FILE, FOLDER, engine_choice
from muster.client.journal import write_durably
from muster.protocol.encoding import hex0x
from muster.settings.options import RECIPE


@click.command()
@click.option("--model", type=FOLDER, required=True, help="Folder of the base model.")
@click.option("--task-set", type=FILE, help="The run's task set; without, the model's own prompts.")
@click.option(
    "--recipe", type=RECIPE, help="The run's: TOML, canonical JSON, preset; without, a plain one."
)
@click.option(
    "--out",
    type=FILE,
    default="calibration.json",
    show_default=True,
    help="Where the calibration is written.",
)
@click.option("--plot", type=FILE, help="Where detection is drawn: .svg or .png.")
@click.option(
    "--engines",
    metavar="ENGINE:DTYPE,...",
    help="Several instead of --engine and --dtype; cheats run on the first.",
)
@click.option(
    "--other", "others", multiple=True, help="NAME=FOLDER: a model that a cheat could run instead."
)
@click.option(
    "--profile",
    type=click.Choice(["quick", "full"]),
    default="full",
    show_default=True,
    help="How many honest ways and cheats are measured.",
)
@click.option(
    "--samples",
    type=int,
    default=320,
    show_default=True,
    help="Samples of one proof to measure; of longer ones fewer.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the measurement.")
@engine_choice
def calibrate(
    model: Path,
    task_set: Path | None,
    recipe: Path | None,
    out: Path,
    plot: Path | None,
    others: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure the limits inside which validators take work for honest. Prints the document's hash.

    Writes nothing and fails for a model on which a forger that computed nothing, or a cheat that
    saves most of the work, gets through.

    \b
    Example:
      muster calibrate --model model --task-set tasks.jsonl --recipe recipe.toml
    """
    from rich.console import Console

    from muster.client import calibration as inputs

    rules = inputs.PLAIN_RECIPE
    if recipe is not None:
        from muster.inference.framing import pin_prompt

        rules = pin_prompt(inputs.read_recipe(recipe), model)
    prompts = [] if task_set is None else inputs.prompts_of(inputs.read_task_set(task_set), rules)
    cheaper = inputs.parse_others(others)
    from muster.inference.plan import Plan, require_sound

    engines = inputs.engines_of(options)
    plan = Plan(
        rules,
        prompts,
        engines,
        cheaper,
        options["profile"],
        options["samples"],
        options["seed"],
        options["device"] or "cpu",
        options["threads"] or 1,
    )
    require_sound(model, plan)
    inputs.require_writable(out)
    from muster.inference.calibrate import calibrate_model
    from muster.inference.loading import require_device

    require_device(plan.device)
    found = calibrate_model(model, plan, progress=lambda message: click.echo(message, err=True))
    Console(stderr=True).print(inputs.make_table(found.table, rules))
    if plot is not None:
        inputs.save_drawing(
            plot, found.table, rules, f"{model.resolve().name}, {', '.join(engines)}"
        )
    if found.refusal is not None:
        raise found.refusal
    write_durably(out, found.calibration.to_bytes())
    click.echo(hex0x(found.calibration.hash()))
