"""A short training run on fixed accepted files, and the figures that it must leave.

Run as a script it writes `trajectory.json`: do so when numerics were meant to change, and say in
the commit why. Files, base model and noise follow from seeds, so nothing but the numerics can move
the figures. Tolerances leave room for other processors, not for another computation.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.protocol.encoding import file_hash
from muster.protocol.ids import Hash32, PolicyVersion, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.trainer.base_model import WarmStart, build_base_model
from muster.trainer.learn.learner import Learner
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.stream.reader import Cursor, StreamReader

PINNED = Path(__file__).with_name("trajectory.json")
STEPS = 6
RECIPE = Recipe(
    name="trajectory",
    sampling=SamplingRecipe(
        problems_per_submission=4,
        samples_per_problem=6,
        temperature=0.8,
        max_new_tokens=12,
        target_lengths=(4, 8),
    ),
    # INTELLECT-2's defaults, but at a rate that moves a small model.
    training=TrainingRecipe(
        steps=STEPS,
        submissions_per_step=2,
        optimizer_steps=2,
        learning_rate=1e-3,
        warmup_steps=3,
        kl_coefficient=0.05,
        entropy_coefficient=0.01,
        length_alpha=0.01,
    ),
)
FIGURES = ("loss", "grad_norm", "entropy", "kl", "max_ratio", "clip_fraction")
"""The pinned figures of a training step."""


def submission(seed: int, version: int) -> bytes:
    """Return an accepted file: random completions of random lengths, rewarded by a rule."""
    rng = random.Random(seed)
    rows = []
    for group in range(RECIPE.sampling.problems_per_submission):
        prompt = tuple(rng.randrange(3, 13) for _ in range(rng.randrange(3, 8)))
        for sample in range(RECIPE.sampling.samples_per_problem):
            body = [rng.randrange(3, 13) for _ in range(rng.randrange(1, 11))]
            rows.append(
                Rollout(
                    problem_id=f"p{seed}-{group}",
                    group=group,
                    sample=sample,
                    sampling_seed=rng.getrandbits(64),
                    target_length=rng.choice(RECIPE.sampling.target_lengths),
                    policy_version=version,
                    prompt_tokens=prompt,
                    completion_tokens=(*body, 1),
                    proofs=b"proof",
                    task_reward=float(body[0] > prompt[0]),
                )
            )
    return encode_rollouts(rows)


@dataclass(frozen=True, slots=True)
class Item:
    """An accepted record at its place."""

    position_in_stream: int
    record: OutcomeRecord


class Accepted:
    """The ledger and the files of the run; rollouts are up to two versions old."""

    def __init__(self) -> None:
        self._files: dict[Hash32, bytes] = {}
        self._items: list[Item] = []
        for position in range(STEPS * RECIPE.training.submissions_per_step):
            step = position // RECIPE.training.submissions_per_step
            version = max(0, step - position % 3)
            data = submission(position, version)
            self._files[file_hash(data)] = data
            self._items.append(Item(position, _record(position, version, data)))

    def stream(self) -> Sequence[Item]:
        """Return the training stream."""
        return self._items

    async def changed(self) -> None:
        """The chain never changes, so a reader that waits would wait for ever."""
        raise AssertionError("the step wants more files than there are")

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return a file."""
        return self._files[submission_file_hash]


def _record(position: int, version: int, data: bytes) -> OutcomeRecord:
    return OutcomeRecord(
        worker_id=1,
        step=Step(1),
        index=position,
        policy_version=PolicyVersion(version),
        file_hash=file_hash(data),
        rollouts=RECIPE.sampling.problems_per_submission * RECIPE.sampling.samples_per_problem,
        units=10,
        verdict=Verdict.ACCEPTED,
        reason=Reason.NONE,
    )


def train(folder: Path) -> list[dict[str, Any]]:
    """Return the pinned figures of every step."""
    torch.set_num_threads(1)
    build_base_model(folder / "model", seed=3, warm_start=WarmStart(steps=0))
    shelf = PolicyShelf(folder / "policies")
    shelf.adopt(folder / "model")
    learner = Learner(shelf.path(BASE), RECIPE, published=shelf.weights)
    return asyncio.run(_steps(learner, shelf))


async def _steps(learner: Learner, shelf: PolicyShelf) -> list[dict[str, Any]]:
    accepted = Accepted()
    reader = StreamReader(accepted, accepted, RECIPE, vocab_size=16)
    cursor, found = Cursor(), []
    for number in range(1, STEPS + 1):
        taken = await reader.next_step(cursor, PolicyVersion(number - 1))
        figures = learner.step(Step(number), taken.groups)
        weights = learner.weights()
        shelf.write(PolicyVersion(number), weights)
        cursor = taken.end
        row: dict[str, Any] = {name: float(getattr(figures, name)) for name in FIGURES}
        found.append({**row, "tokens": figures.tokens, "weights": checksums(weights)})
    return found


def checksums(weights: Mapping[str, Tensor]) -> list[float]:
    """Return numbers that a change of any weight moves: the norm, and three random projections."""
    flat = torch.cat([weights[name].detach().flatten().double() for name in sorted(weights)])
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (3, len(flat)), generator=generator).double() * 2 - 1
    return [float(flat.norm()), *(signs @ flat).tolist()]


def main() -> None:
    """Write what this machine computes."""
    with tempfile.TemporaryDirectory() as folder:
        rows = train(Path(folder))
    PINNED.write_text(json.dumps({"torch": torch.__version__, "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
