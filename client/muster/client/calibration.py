"""`muster calibrate`: the limits within which validators accept work as honest.

Reads a run owner's files, measures the limits, and shows them as a table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.options import (
    FILE,
    FOLDER,
    PASSWORD_HELP,
    engine_choice,
    open_keystore,
    parse_account,
)
from muster.inference.calibrated_limits import detection, submission_size
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, EncodingError, MusterError
from muster.protocol.ids import Address, to_address
from muster.protocol.intervals import rate_bound, wilson
from muster.protocol.prompts import Prompt, render_prompt
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.settings import parse_document, read_file, read_toml
from muster.settings.flags import RECIPE
from muster.tasks import TaskSet
from muster.toploc.calibration import MeasuredMachine, Measurement

if TYPE_CHECKING:
    from rich.table import Table

    from muster.inference.contributions import Signed

MOST_PROMPTS = 256
"""Most prompts that a calibration uses; more add little."""

PLAIN_RECIPE = Recipe(
    name="calibration",
    sampling=SamplingRecipe(
        problems_per_submission=8, samples_per_problem=16, temperature=1.0, max_new_tokens=64
    ),
    training=TrainingRecipe(submissions_per_step=1),
)
"""Recipe when none is given: whole chunks, INTELLECT-2's learning rate."""


def read_recipe(file: Path) -> Recipe:
    """Return the recipe in a TOML file or a canonical document; raises ConfigError."""
    if file.suffix == ".toml":
        return parse_document(Recipe, read_toml(file), file)
    try:
        return Recipe.from_bytes(read_file(file))
    except EncodingError as error:
        raise ConfigError(f"{file} is not a recipe: {error}") from error


def read_task_set(file: Path) -> TaskSet:
    """Return the task set in a file; raises ConfigError."""
    try:
        return TaskSet.open(file)
    except MusterError as error:
        raise ConfigError(f"{file} is not a task set: {error}") from error


def prompts_of(task_set: TaskSet, recipe: Recipe) -> list[Prompt]:
    """Return prompts as tickets would render them; target lengths are assigned in turn."""
    first = range(min(MOST_PROMPTS, len(task_set)))
    chosen = task_set.spread(MOST_PROMPTS) if task_set.parts else first
    prompts = []
    for turn, index in enumerate(chosen):
        lengths = recipe.rules_of(task_set.part_at(index)).target_lengths or (-1,)
        length = lengths[turn % len(lengths)]
        prompts.append(render_prompt(task_set[index].prompt, length, recipe.prompt))
    return prompts


def engines_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the engines that the flags name; raises ConfigError when two kinds of flags name
    them."""
    if options["engines"] is None:
        return (f"{options['engine'] or 'transformers'}:{options['dtype'] or 'float32'}",)
    if options["engine"] or options["dtype"]:
        raise ConfigError("--engines says engines and number formats", hint="leave out --engine")
    return tuple(options["engines"].split(","))


def read_contributions(given: Sequence[str]) -> list[Signed]:
    """Return the contributions of ADDRESS=FILE pairs; raises ConfigError and EngineError."""
    from muster.inference.contributions import read_file

    found: dict[Address, Signed] = {}
    for pair in given:
        address, _, file = pair.partition("=")
        try:
            signer = to_address(address)
        except EncodingError as error:
            raise ConfigError(f"{pair!r} is not ADDRESS=FILE") from error
        if signer in found:
            raise ConfigError(f"{address} is named twice", hint="one file of each contributor")
        found[signer] = read_file(Path(file), signer)
    return list(found.values())


def machines_table(machines: Sequence[MeasuredMachine]) -> Table:
    """Return a table of all machines' figures."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    table.title = "Machines: worst errors, and samples outside the limits of the first alone"
    for name in ("machine", "samples", "outside", "exponents", "mean", "margin"):
        table.add_column(name, justify="left" if name == "machine" else "right")
    for each in machines:
        figures = (each.exponent_mismatches, each.mantissa_error_mean, each.margin)
        table.add_row(
            each.name, str(each.samples), str(each.outside), *(f"{x:.4g}" for x in figures)
        )
    return table


def require_writable(out: Path) -> None:
    """Raise ConfigError when a file could not be written at the end."""
    folder = out.resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or out.is_dir():
        raise ConfigError(f"cannot write {out}", hint="give a file in a folder that exists")


def parse_others(given: Sequence[str]) -> dict[str, Path]:
    """Return the folders of NAME=FOLDER pairs; raises ConfigError."""
    found: dict[str, Path] = {}
    for pair in given:
        name, _, folder = pair.partition("=")
        if not name or not folder or not Path(folder).is_dir():
            raise ConfigError(f"{pair!r} is not NAME=FOLDER with an existing folder")
        found[name] = Path(folder)
    return found


SERIES = {
    "weights in int": "integer weights",
    "weights with": "noisy weights",
    "neighbour policy": "neighbour versions",
    "key-value cache": "rounded cache",
    "true proofs": "cheap tokens, true proofs",
}
"""Kinds of cheats that have strengths: a part of rows' names, and the kind's label."""
FORGED = "that computed nothing"
"""Common label of forgers."""
ONE_TOKEN = ", one token only"
"""Suffix of the names of cheats on the shortest completions."""
WORK_WIDTH = 27
"""Width of the column of names."""


def make_table(measured: Sequence[Measurement], recipe: Recipe) -> Table:
    """Return the measurements as a table of 80 columns that fits a screen.

    One row for all honest ways, one for all forgers that computed nothing, one for each kind of
    cheat. Each row shows the variant that is detected least. Shares have 95 % intervals. A
    submission is detected when at least one of its samples is.
    """
    from rich.table import Table

    size = submission_size(recipe)
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    table.title = f"Noticed, of {len(measured)} ways to work (95 % intervals)"
    table.add_column("work", max_width=WORK_WIDTH)
    for name in ("trials", "noticed", f"submissions of {size}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*_honest_cells([row for row in measured if row.kind == "honest"]))
    for rows in _kinds_of(measured):
        table.add_row(*_cells(rows, size))
    return table


def _kinds_of(measured: Sequence[Measurement]) -> list[list[Measurement]]:
    """Return the cheats by kind, in each the least detected first."""
    kinds: dict[str, list[Measurement]] = {}
    for row in measured:
        if row.kind != "honest":
            name = FORGED if row.kind == "nothing" else series_of(row).removesuffix(ONE_TOKEN)
            kinds.setdefault(name, []).append(row)
    return [sorted(rows, key=lambda r: -r.accepted / r.trials) for rows in kinds.values()]


def _honest_cells(rows: Sequence[Measurement]) -> list[str]:
    trials = sum(row.trials for row in rows)
    failed = trials - sum(row.accepted for row in rows)
    bound = (
        f"< {rate_bound(max(1, trials)):.1e}" if not failed else _interval(*wilson(failed, trials))
    )
    return [f"honest, {len(rows)} pairs of ways", str(trials), f"{failed} ({bound})", ""]


def _cells(rows: Sequence[Measurement], size: int) -> list[str]:
    least = rows[0]
    failed = least.trials - least.accepted
    noticed = f"{failed / least.trials:.1%} ({_interval(*wilson(failed, least.trials))})"
    name = least.name
    if len(rows) > 1:
        kind = FORGED if least.kind == "nothing" else "of this kind"
        name = f"{name} (least noticed of {len(rows)} {kind})"
    trials = f"{least.trials} {least.judged}s"
    if least.judged == "chunk" or least.kind == "nothing":
        return [name, trials, noticed, ""]
    return [name, trials, noticed, _interval(*detection(least, size))]


def _interval(low: float, high: float) -> str:
    return f"{low:.1%} to {high:.1%}"


def series_of(row: Measurement) -> str:
    """Return the kind of a cheat."""
    return next((label for part, label in SERIES.items() if part in row.name), row.name)


# The command


@click.command()
@click.option("--model", type=FOLDER, required=True, help="Folder of the base model.")
@click.option("--task-set", type=FILE, help="The run's; without, the model's own prompts.")
@click.option("--recipe", type=RECIPE, help="The run's; without, a plain one.")
@click.option(
    "--out", type=FILE, default="calibration.json", help="Where the calibration is written."
)
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
    others: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure the limits within which validators accept work as honest. Prints the document's hash.

    Fails and writes nothing if a forger that computes nothing, or a cheat that saves most of the
    work, is not detected on this model, or if the limits refuse honest work.

    \b
    Examples:
      muster calibrate --model model --task-set tasks.jsonl --recipe recipe.toml
      muster calibrate --model model --device cuda --contribute --keystore key.json --out h100
      muster calibrate --model model --with 0x...=h100
    """
    from rich.console import Console

    rules = PLAIN_RECIPE
    if recipe is not None:
        from muster.inference.framing import pin_prompt

        rules = pin_prompt(read_recipe(recipe), model)
    prompts = [] if task_set is None else prompts_of(read_task_set(task_set), rules)
    cheaper = parse_others(others)
    from muster.inference.calibration_plan import MeasuringPlan, require_sound

    plan = MeasuringPlan(
        rules,
        prompts,
        engines_of(options),
        cheaper,
        options["profile"],
        options["samples"],
        options["seed"],
        options["device"] or "cpu",
        options["threads"] or 1,
    )
    require_sound(model, plan)
    require_writable(out)
    if options["contribute"] and options["keystore"] is None:
        raise ConfigError("a contribution is signed", hint="give your key with --keystore FILE")
    from muster.inference.calibrate import calibrate_model, contribute
    from muster.inference.contributions import to_file
    from muster.inference.loading import require_device

    require_device(plan.device)
    others_said = read_contributions(options["given"])
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
    console.print(make_table(found.table, rules))
    if others_said:
        console.print(machines_table(found.calibration.machines))
    if found.refusal is not None:
        raise found.refusal
    write_durably(out, found.calibration.to_bytes())
    click.echo(hex0x(found.calibration.hash()))
