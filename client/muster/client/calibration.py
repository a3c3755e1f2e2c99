"""`muster calibrate`: from a run owner's files to a calibration document and a table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.recipe import Recipe
from muster.tasks import TaskSet, render_prompt
from muster.toploc.calibration import Measurement

MOST_PROMPTS = 256
"""Prompts a calibration samples from; more add little."""


def read_recipe(file: Path) -> Recipe:
    """Return the recipe in a TOML file or a canonical document; raises ConfigError."""
    data = _read(file)
    try:
        if file.suffix != ".toml":
            return Recipe.from_bytes(data)
        # TOML has no tuples: validated as JSON, strictness is of the JSON kind.
        return Recipe.model_validate_json(json.dumps(tomllib.loads(data.decode())))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{file}: {name}: {problem['msg']}") from error
    except (MusterError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} is not a recipe: {error}") from error


def read_task_set(file: Path) -> TaskSet:
    """Return the task set in a file; raises ConfigError."""
    try:
        return TaskSet.from_bytes(_read(file))
    except MusterError as error:
        raise ConfigError(f"{file} is not a task set: {error}") from error


def prompts_of(task_set: TaskSet, recipe: Recipe) -> list[str]:
    """Return prompts as tickets would render them, target lengths taken in turn."""
    lengths = recipe.sampling.target_lengths or (-1,)
    return [
        render_prompt(problem, lengths[i % len(lengths)])
        for i, problem in enumerate(task_set.problems[:MOST_PROMPTS])
    ]


def format_table(table: Sequence[Measurement]) -> str:
    """Return the measurements as an aligned table."""
    lines = [
        f"{'kind':8} {'judged':7} {'accepted':>13}  {'exp':>6} {'mean':>7} {'margin':>8}  what"
    ]
    for row in table:
        accepted = f"{row.accepted}/{row.trials}"
        lines.append(
            f"{row.kind:8} {row.judged:7} {accepted:>13}  {row.exponent_mismatches:6.3f} "
            f"{min(row.mantissa_error_mean, 9999):7.2f} {row.margin:8.4f}  {row.name}"
        )
    return "\n".join(lines)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
