"""The bytes that torch has allocated at the peak of a training step, by its own count.

Neither the machine's load nor what else the process has in memory changes them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import AdapterRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.sft_learner import SftLearner

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
    """All samples of a step at full length; of version 0, which is soon stale."""
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


def kept_bytes(learner: Learner | SftLearner) -> int:
    """Return the bytes of weights, their copies and the optimiser's state."""
    passes: Any = learner._passes
    models = {id(m): m for m in (learner.model, passes._computing.model)}.values()
    found: list[Tensor] = [p for model in models for p in model.parameters()]
    for state in learner.optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in found}.values())


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of bytes that some work allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    results: Any = profiled.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
