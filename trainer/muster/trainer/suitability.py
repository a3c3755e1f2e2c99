"""Whether a run's model, recipe and calibration suit one another: asked before a run is created.

What takes seconds is asked of the documents; what takes a model, of a sample of the problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.protocol.errors import ConfigError
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import MAX_FILE_BYTES, MAX_ROWS
from muster.tasks import TaskSet
from muster.toploc import Calibration
from muster.toploc.wire import chunk_shapes
from muster.trainer.policies import BASE

if TYPE_CHECKING:
    from muster.inference.transformers_engine import TransformersEngine
    from muster.trainer.evaluate import Evaluation

TOKEN_BYTES = 4
"""Of a token in a submission's file, before compression."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How much of a task set is tried with the base model."""

    problems: int
    """Problems, evenly spread over the set."""
    samples: int
    """Completions of each."""
    device: str = "cpu"
    """Where the model computes."""
    threads: int = 1
    """CPU threads of the model."""


def largest_file(recipe: Recipe, hidden_size: int) -> int:
    """Return the bytes of a submission all of whose completions are as long as they may be."""
    sampling, proof = recipe.sampling, recipe.proof
    shapes = chunk_shapes(
        sampling.max_new_tokens, hidden_size, chunk_tokens=proof.chunk_tokens, topk=proof.topk
    )
    row = sum(shape.proof_bytes for shape in shapes) + TOKEN_BYTES * sampling.max_new_tokens
    return sampling.problems_per_submission * sampling.samples_per_problem * row


def require_files_fit(recipe: Recipe, hidden_size: int) -> None:
    """Raise ConfigError when a submission of long completions would be refused for its size."""
    sampling = recipe.sampling
    rows = sampling.problems_per_submission * sampling.samples_per_problem
    if rows > MAX_ROWS:
        raise ConfigError(
            f"a submission of {rows} samples does not fit an outcome record: at most {MAX_ROWS}",
            hint="lower sampling.problems_per_submission or sampling.samples_per_problem",
        )
    size = largest_file(recipe, hidden_size)
    if size > MAX_FILE_BYTES:
        raise ConfigError(
            f"a submission of {rows} samples of {sampling.max_new_tokens} tokens can take "
            f"{size / 2**20:,.1f} MiB with its proofs, files may have {MAX_FILE_BYTES >> 20}",
            hint="lower sampling.problems_per_submission or sampling.max_new_tokens",
        )


def try_model(
    folder: Path, recipe: Recipe, task_set: TaskSet, calibration: Calibration, sample: Sample
) -> Evaluation:
    """Return how the base model does on a sample of the problems; blocking.

    Raises EngineError when it does not load, ConfigError when the calibration is of another one.
    """
    from muster.inference.transformers_engine import TransformersEngine
    from muster.trainer.evaluate import Evaluator

    engine = TransformersEngine(threads=sample.threads, device=sample.device)
    engine.load_policy(folder, BASE)
    require_calibrated(calibration, engine, folder)
    count = min(sample.problems, len(task_set))
    chosen = [task_set[n * len(task_set) // count] for n in range(count)]
    some = TaskSet.of(task_set.name, task_set.version, chosen)
    return Evaluator(some, engine, recipe, samples=sample.samples).evaluate(folder, BASE)


def require_calibrated(calibration: Calibration, engine: TransformersEngine, folder: Path) -> None:
    """Raise ConfigError when the limits were measured on a model of another shape."""
    measured = calibration.model
    found = (type(engine.model).__name__, engine.hidden_size, engine.vocab_size)
    if found != (measured.architecture, measured.hidden_size, measured.vocab_size):
        name, hidden, vocabulary = found
        raise ConfigError(
            f"{folder} is a {name} of width {hidden} and vocabulary {vocabulary}, the calibration "
            f"is of a {measured.architecture} of {measured.hidden_size} and {measured.vocab_size}",
            hint="measure this model: muster calibrate --model FOLDER",
        )
