"""`muster calibrate`: from a run owner's files to what a calibration needs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.tasks import TaskSet, render_prompt

MOST_PROMPTS = 256
"""Prompts a calibration samples from; more add little."""

PLAIN_RECIPE = Recipe(
    name="calibration",
    sampling=SamplingRecipe(
        problems_per_submission=8, samples_per_problem=16, temperature=1.0, max_new_tokens=64
    ),
    training=TrainingRecipe(submissions_per_step=1),
)
"""What is measured when no recipe is given: whole chunks, INTELLECT-2's learning rate."""


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
        return TaskSet.open(file)
    except MusterError as error:
        raise ConfigError(f"{file} is not a task set: {error}") from error


def prompts_of(task_set: TaskSet, recipe: Recipe) -> list[str]:
    """Return prompts as tickets would render them, target lengths taken in turn."""
    lengths = recipe.sampling.target_lengths or (-1,)
    return [
        render_prompt(problem, lengths[i % len(lengths)])
        for i, problem in enumerate(task_set.problems[:MOST_PROMPTS])
    ]


def parse_others(given: Sequence[str]) -> dict[str, Path]:
    """Return the folders of NAME=FOLDER pairs; raises ConfigError."""
    found: dict[str, Path] = {}
    for pair in given:
        name, _, folder = pair.partition("=")
        if not name or not folder or not Path(folder).is_dir():
            raise ConfigError(f"{pair!r} is not NAME=FOLDER with an existing folder")
        found[name] = Path(folder)
    return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
