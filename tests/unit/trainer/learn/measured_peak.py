"""Two training steps in a process of their own, whose peak memory is compared with the plan.

    python measured_peak.py FOLDER '{"recompute": "full", ...}'

FOLDER holds a model. Prints {"planned": bytes, "measured": bytes}.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import AdapterRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.plan import Choices, plan_memory
from muster.trainer.publish.policies import BASE, PolicyShelf

GROUPS, GROUP = 2, 4


def recipe(length: int, rank: int) -> Recipe:
    """Two optimiser steps with a KL term, samples of `length` tokens at most."""
    return Recipe(
        name="peak",
        sampling=SamplingRecipe(
            problems_per_submission=GROUPS,
            samples_per_problem=GROUP,
            temperature=1.0,
            max_new_tokens=length,
        ),
        training=TrainingRecipe(submissions_per_step=2, optimizer_steps=2),
        adapter=AdapterRecipe(rank=rank),
    )


def groups(length: int) -> list[list[Rollout]]:
    """All samples of a step, each as long as it may be; of version 0, which is soon stale."""
    return [
        [
            Rollout(
                problem_id=f"p{group}",
                group=group,
                sample=sample,
                sampling_seed=sample,
                target_length=-1,
                policy_version=PolicyVersion(0),
                prompt_tokens=(group + 1,),
                completion_tokens=tuple((7 * i + sample) % 50 for i in range(length - 1)),
                proofs=b"proof",
                task_reward=float(sample % 2),
            )
            for sample in range(GROUP)
        ]
        for group in range(2 * GROUPS)
    ]


def main(folder: Path, wanted: dict[str, Any]) -> None:
    """Plan, take two steps, print both figures."""
    torch.set_num_threads(1)
    rank = wanted.pop("rank", 0)
    shelf = PolicyShelf(folder.with_name("shelf"))
    shelf.adopt(folder)
    length = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    choices = Choices(memory_gb=1000.0, **wanted)
    plan = plan_memory(folder, recipe(length, rank), choices)
    learner = Learner(
        shelf.path(BASE),
        recipe(length, rank),
        published=lambda _: shelf.weights(BASE),
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=plan.recompute,
        compute_dtype=choices.compute_dtype,
    )
    for number in (1, 2):
        learner.step(Step(number), groups(length))
    measured = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # Nothing is written to the disk here.
    rows = [p for p in plan.parts if p.name != "versions on their way out"]
    planned = max(sum(p.reading for p in rows), sum(p.training for p in rows))
    sys.stdout.write(json.dumps({"planned": planned, "measured": measured}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
