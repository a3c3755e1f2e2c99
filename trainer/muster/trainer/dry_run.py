"""What a trainer would run with: settings and recipe resolved, without chain, keys or models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError
from muster.tasks import TaskSet
from muster.trainer.config import TrainerSettings, load_recipe
from muster.trainer.create import pinned_recipe


def resolve(
    settings: TrainerSettings, recipe_file: Path | None, task_set_file: Path | None
) -> dict[str, Any]:
    """Return the resolved settings, and the recipe with the hash that a run pins for it.

    The hash covers who grades, so it needs the task set; without a recipe there is neither.
    """
    found: dict[str, Any] = {"settings": settings.model_dump(mode="json")}
    if recipe_file is None:
        return found
    if task_set_file is None:
        raise ConfigError(
            "a recipe is pinned together with the verifiers of its tasks",
            hint="give the problems as well: --task-set FILE",
        )
    recipe = pinned_recipe(load_recipe(recipe_file), _task_types(task_set_file))
    found |= {"recipe": recipe.model_dump(mode="json"), "recipe_hash": hex0x(recipe.hash())}
    return found


def _task_types(path: Path) -> set[str]:
    return {problem.task_type for problem in TaskSet.open(path)}
