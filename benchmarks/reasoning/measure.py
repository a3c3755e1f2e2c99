"""Held-out accuracy of a model folder by part, with intervals: as a run samples, and nearly greedy.

    python -m benchmarks.reasoning.measure MODEL TASKS RECIPE SAMPLES

Prints JSON. A process of its own, so that no stage's weights or threads touch the next one's.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.inference.framing import pin_prompt
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.tasks import TaskSet
from muster.trainer.config import load_recipe
from muster.trainer.measure.evaluate import Evaluator

TEMPERATURES = {"sampled": 1.0, "greedy": 0.05}
"""Ways of sampling. A gain only in the first one is certainty, not knowledge."""


def measure(model: Path, tasks: Path, recipe: Path, samples: int) -> dict[str, Any]:
    """Return the evaluations by the way of asking; samples are of each problem at temperature 1."""
    pinned = pin_prompt(load_recipe(recipe), model)
    task_set, engine = TaskSet.open(tasks), TransformersEngine()
    found = {}
    for way, temperature in TEMPERATURES.items():
        count = samples if way == "sampled" else 1
        evaluator = Evaluator(task_set, engine, _at(pinned, temperature), samples=count)
        found[way] = asdict(evaluator.evaluate(model, PolicyVersion(0)))
    return found


def _at(recipe: Recipe, temperature: float) -> Recipe:
    sampling = recipe.sampling.model_copy(update={"temperature": temperature})
    return recipe.model_copy(update={"sampling": sampling})


def main() -> None:
    """Measure what the command line says."""
    model, tasks, recipe, samples = sys.argv[1:]
    print(json.dumps(measure(Path(model), Path(tasks), Path(recipe), int(samples))))


if __name__ == "__main__":
    main()
