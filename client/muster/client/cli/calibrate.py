"""`muster calibrate`: measure the limits inside which validators take work for honest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from muster.client.cli.options import (
    FILE,
    FOLDER,
    PASSWORD_HELP,
    engine_choice,
    open_keystore,
    parse_account,
)
from muster.client.journal import write_durably
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError
from muster.settings.options import RECIPE


@click.command()
@click.option("--model", type=FOLDER, required=True, help="Folder of the base model.")
@click.option("--task-set", type=FILE, help="The run's; without, the model's own prompts.")
@click.option("--recipe", type=RECIPE, help="The run's; without, a plain one.")
@click.option(
    "--out", type=FILE, default="calibration.json", help="Where the calibration is written."
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
    help="How many honest ways and cheats are measured.",
)
@click.option("--samples", type=int, default=320, help="Samples, were each one proof.")
@click.option("--seed", type=int, default=0, help="Seed of the measurement.")
@click.option("--contribute", is_flag=True, help="Measure for somebody else: --out is signed.")
@click.option("--keystore", type=FILE, help="With --contribute: who signs.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option(
    "--with", "given", multiple=True, metavar="ADDRESS=FILE", help="Another machine's; repeatable."
)
@click.option("--accept", multiple=True, metavar="ADDRESS", help="Whose outlier may widen limits.")
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
    Examples:
      muster calibrate --model model --task-set tasks.jsonl --recipe recipe.toml
      muster calibrate --model model --device cuda --contribute --keystore key.json --out h100
      muster calibrate --model model --with 0x...=h100
    """
    from rich.console import Console

    from muster.client import calibration as inputs

    rules = inputs.PLAIN_RECIPE
    if recipe is not None:
        from muster.inference.framing import pin_prompt

        rules = pin_prompt(inputs.read_recipe(recipe), model)
    prompts = [] if task_set is None else inputs.prompts_of(inputs.read_task_set(task_set), rules)
    cheaper = inputs.parse_others(others)
    from muster.inference.plan import MeasuringPlan, require_sound

    engines = inputs.engines_of(options)
    plan = MeasuringPlan(
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
    if options["contribute"] and options["keystore"] is None:
        raise ConfigError("a contribution is signed", hint="--keystore FILE")
    from muster.inference.calibrate import calibrate_model, contribute
    from muster.inference.contributions import to_file
    from muster.inference.loading import require_device

    require_device(plan.device)
    others_said = inputs.read_contributions(options["given"])
    tell = partial(click.echo, err=True)
    if options["contribute"]:
        wallet = open_keystore(options["keystore"], options["password_file"])
        made = contribute(model, plan, contributions=others_said, progress=tell)
        write_durably(out, to_file(made, wallet.key))
        click.echo(wallet.address)
        return
    accepted = [parse_account(address) for address in options["accept"]]
    found = calibrate_model(
        model, plan, contributions=others_said, accepted=accepted, progress=tell
    )
    console = Console(stderr=True)
    console.print(inputs.make_table(found.table, rules))
    if others_said:
        console.print(inputs.machines_table(found.calibration.machines))
    if plot is not None:
        title = ", ".join([model.resolve().name, *engines])
        inputs.save_drawing(plot, found.table, rules, title)
    if found.refusal is not None:
        raise found.refusal
    write_durably(out, found.calibration.to_bytes())
    click.echo(hex0x(found.calibration.hash()))
