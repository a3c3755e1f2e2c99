"""A training step on this machine with made-up rollouts, and how many workers keep it busy."""

import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import Step
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import PROCESS, SAVING, MemoryChoices, MemoryPlan, plan_memory
from muster.trainer.measure.figures import PHASES, StepFigures
from muster.trainer.measure.throughput import measure_peak_flops
from muster.trainer.publish.policies import BASE, MappedWeights, vocab_size

SPREAD = 0.5
"""Standard deviation of the logarithm of made-up completions' lengths."""
SAMPLED_TOKENS = 128
"""Most tokens of a completion when a worker's speed is measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """Size of the made-up step; None takes the recipe's value."""

    groups: int | None = None
    """Groups of the measured step; the time of the recipe's step is extrapolated from it."""
    prompt_tokens: int = 64
    """Tokens of a prompt."""
    completion_tokens: int | None = None
    """Mean tokens of a completion; None for half of the limit."""
    repeats: int = 2
    """Measured steps, of which the median counts; one more step before them is not counted."""


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """Measured figures."""

    plan: MemoryPlan
    """The memory plan of the measured step."""
    step: StepFigures
    """The step that was measured."""
    wall_s: float
    """Its duration."""
    peak_flops: float
    """Operations per second of the machine."""
    step_s: float
    """Duration of the recipe's step."""
    step_tokens: int
    """Completion tokens that the recipe's step trains on."""
    worker_tokens_per_s: float
    """Completion tokens per second of a worker."""
    unmeasured: frozenset[str] = frozenset({SAVING})
    """Parts of the plan that were not measured."""

    @property
    def workers(self) -> int:
        """Workers that generate as much in a step's time as it trains on."""
        return math.ceil(self.step_tokens / self.step_s / self.worker_tokens_per_s)

    @property
    def planned_bytes(self) -> float:
        """Planned bytes of the measured parts."""
        parts = [part for part in self.plan.parts if part.name not in self.unmeasured]
        return max(sum(p.reading for p in parts), sum(p.training for p in parts))

    def figures(self) -> dict[str, Any]:
        """Return all figures by name; units as in docs/reference/metrics.md."""
        return {
            "plan": self.plan.figures(),
            "samples": self.step.samples,
            "tokens": self.step.tokens,
            "wall_s": self.wall_s,
            **self.step.seconds,
            "tokens_per_s": self.step.tokens / self.wall_s,
            "tflops": self.step.flops / self.wall_s / 1e12,
            "peak_tflops": self.peak_flops / 1e12,
            "mfu": self.step.flops / self.wall_s / self.peak_flops,
            "memory_gb": self.step.memory_bytes / 1e9,
            "planned_memory_gb": self.planned_bytes / 1e9,
            "recipe_step_s": self.step_s,
            "recipe_step_tokens": self.step_tokens,
            "worker_tokens_per_s": self.worker_tokens_per_s,
            "workers": self.workers,
        }

    def text(self) -> str:
        """Return the figures as text for people."""
        found = self.figures()
        parts = ", ".join(f"{name.removesuffix('_s')} {found[name]:.2f}" for name in PHASES)
        return "\n".join(
            [
                self.plan.table(),
                f"step of {found['samples']} samples, {found['tokens']} completion tokens: "
                f"{self.wall_s:.2f} s ({parts})",
                f"{found['tokens_per_s']:.0f} tokens/s, {found['tflops']:.3f} of "
                f"{found['peak_tflops']:.3f} TFLOP/s: MFU {found['mfu']:.2f}",
                f"memory: {found['memory_gb']:.2f} GB measured, "
                f"{found['planned_memory_gb']:.2f} GB planned, without versions on their way out",
                f"the recipe's step: {self.step_tokens} completion tokens in {self.step_s:.1f} s; "
                f"a worker samples {self.worker_tokens_per_s:.0f} tokens/s: {self.workers} of them "
                "keep the trainer busy, more where filters leave rollouts out",
            ]
        )


def measure_step(
    model: Path,
    recipe: Recipe,
    choices: MemoryChoices,
    load: Load,
    *,
    peak_flops: float | None = None,
    worker_tokens_per_s: float | None = None,
) -> BenchFigures:
    """Measure a model folder's training step; peak and worker speed are measured unless given.

    Samples are one version old if the recipe allows that, so each needs a behaviour pass. Raises
    MemoryShort when the plan does not fit.
    """
    plan = plan_memory(model, recipe, choices)
    groups = made_up(recipe, vocab_size(model), load)
    step, wall_s = _median_step(_learner(model, recipe, choices, plan), groups, load.repeats)
    whole = _groups_of(recipe)
    taken = min(recipe.training.optimizer_steps, len(groups))
    passes_s = wall_s - step.seconds["optimizer_s"]
    step_s = passes_s * whole / len(groups) + step.seconds["optimizer_s"] * (
        min(recipe.training.optimizer_steps, whole) / taken
    )
    return BenchFigures(
        plan=plan,
        step=step,
        wall_s=wall_s,
        peak_flops=peak_flops or measure_peak_flops(choices.device, choices.compute_dtype),
        step_s=step_s,
        step_tokens=step.tokens * whole // len(groups),
        worker_tokens_per_s=worker_tokens_per_s or _worker_speed(model, recipe, choices, groups),
        # torch does not count the memory of CUDA itself, and this measurement saves nothing.
        unmeasured=frozenset({SAVING} if choices.device == "cpu" else {SAVING, PROCESS}),
    )


def made_up(recipe: Recipe, vocabulary: int, load: Load) -> list[list[Rollout]]:
    """Return groups of random tokens of version 0, whose lengths have a lognormal distribution.

    Half of a group's samples are right, so none is left out.
    """
    sampling, draw = recipe.sampling, random.Random(0)
    limit = sampling.max_new_tokens
    mean = min(load.completion_tokens or (limit + 1) // 2, limit)
    center = math.log(mean) - SPREAD**2 / 2

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    groups = []
    for group in range(load.groups or _groups_of(recipe)):
        prompt, rows = tokens(load.prompt_tokens), []
        for sample in range(sampling.samples_per_problem):
            length = round(draw.lognormvariate(center, SPREAD))
            rows.append(
                Rollout(
                    problem_id=f"made up {group}",
                    group=group,
                    sample=sample,
                    sampling_seed=draw.getrandbits(64),
                    target_length=sampling.target_lengths[0] if sampling.target_lengths else -1,
                    policy_version=BASE,
                    prompt_tokens=prompt,
                    completion_tokens=tokens(min(max(length, 1), limit)),
                    proofs=b"",
                    task_reward=float(sample % 2),
                )
            )
        groups.append(rows)
    return groups


def _groups_of(recipe: Recipe) -> int:
    return recipe.training.submissions_per_step * recipe.sampling.problems_per_submission


def _learner(model: Path, recipe: Recipe, choices: MemoryChoices, plan: MemoryPlan) -> Learner:
    base = MappedWeights(sorted(model.glob("*.safetensors")))
    is_fresh = not recipe.training.max_async_level
    learner = Learner(
        model,
        recipe,
        # Without staleness the samples come from the very weights that are trained.
        published=lambda _: learner.weights() if is_fresh else base,
        micro_batch_tokens=plan.micro_batch_tokens,
        recomputed=plan.recompute,
        compute_dtype=choices.compute_dtype,
        optimizer_state=choices.optimizer_state,
        offload=Path(tempfile.gettempdir()) if choices.offload else None,
        device=choices.device,
    )
    return learner


def _median_step(
    learner: Learner, groups: Sequence[Sequence[Rollout]], count: int
) -> tuple[StepFigures, float]:
    """Return figures and seconds of the median of `count` steps, after one warm-up step."""
    found = []
    for number in range(1, count + 2):
        began = time.perf_counter()
        figures = learner.step(Step(number), groups)
        found.append((time.perf_counter() - began, figures))
    wall_s, figures = sorted(found[1:], key=lambda each: each[0])[(count - 1) // 2]
    return figures, wall_s


def _worker_speed(
    model: Path, recipe: Recipe, choices: MemoryChoices, groups: Sequence[Sequence[Rollout]]
) -> float:
    """Return the completion tokens per second with which this machine samples, proofs included."""
    engine = TransformersEngine(choices.compute_dtype, device=choices.device)
    engine.load_policy(model, BASE)
    longest = min(recipe.sampling.max_new_tokens, SAMPLED_TOKENS)
    asked = [
        Request(row.prompt_tokens, row.sampling_seed, recipe.sampling.temperature, longest)
        for rows in groups[: recipe.sampling.problems_per_submission]
        for row in rows
    ]
    began = time.perf_counter()
    made = engine.generate(asked, proof=recipe.proof)
    return sum(len(completion.tokens) for completion in made) / (time.perf_counter() - began)
