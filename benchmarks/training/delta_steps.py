"""Real training steps to measure deltas on: GRPO on the demo task, published in bfloat16.

A model of 4 layers, width 256 (3.2 million parameters) is warmed up like the demo's, then trained
by the project's own learner with INTELLECT-2's recipe: AdamW with betas 0.9 and 0.99, weight decay
0.01, gradient clip 0.1, KL and entropy terms, 32 problems x 16 samples per step. Samples come from
the project's engine, on-policy. Learning rate and optimiser steps per training step vary.
"""

import random
from pathlib import Path
from typing import NamedTuple

import torch

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.tasks.toys import sort_prompt
from muster.trainer.base_model import ModelShape, WarmStart, build_base_model
from muster.trainer.learn.learner import Learner
from muster.trainer.publish.policies import PolicyShelf

PROBLEMS, SAMPLES = 32, 16
SHAPE = ModelShape(layers=4, hidden=256, heads=4, initializer_range=0.02)
WARM_START = WarmStart(steps=150, batch=64, learning_rate=1e-3)


class Setting(NamedTuple):
    """What varies between measurements."""

    learning_rate: float
    """AdamW's, without warm-up."""
    optimizer_steps: int
    """Per training step: per published version."""

    @property
    def name(self) -> str:
        """Its name in metrics."""
        rate = f"{self.learning_rate:.0e}".replace("-0", "")
        return rate + (f"_{self.optimizer_steps}" if self.optimizer_steps > 1 else "")


def build_model(folder: Path) -> None:
    """Write the model that every setting starts from."""
    build_base_model(folder, seed=1, warm_start=WARM_START, shape=SHAPE)


def train(model: Path, folder: Path, setting: Setting, steps: int) -> list[Path]:
    """Return the folders of the versions before the first and after each step."""
    torch.set_num_threads(1)
    recipe = _recipe(setting)
    shelf = PolicyShelf(folder, dtype="bfloat16")
    shelf.adopt(model)
    learner = Learner(model, recipe, published=shelf.weights)
    engine, rng = TransformersEngine("float32"), random.Random(5)
    versions = [shelf.write(PolicyVersion(1), learner.weights())]
    for number in range(1, steps + 1):
        version = PolicyVersion(number)
        engine.load_policy(shelf.path(version), version)
        learner.step(Step(number), _groups(engine, recipe, version, rng))
        versions.append(shelf.write(PolicyVersion(number + 1), learner.weights()))
    return versions


def _recipe(setting: Setting) -> Recipe:
    return Recipe(
        name="delta benchmark",
        sampling=SamplingRecipe(
            problems_per_submission=PROBLEMS,
            samples_per_problem=SAMPLES,
            temperature=1.0,
            max_new_tokens=6,
        ),
        training=TrainingRecipe(
            submissions_per_step=1,
            optimizer_steps=setting.optimizer_steps,
            learning_rate=setting.learning_rate,
            warmup_steps=0,
        ),
    )


def _groups(
    engine: TransformersEngine, recipe: Recipe, version: PolicyVersion, rng: random.Random
) -> list[list[Rollout]]:
    """Return a step's samples, graded."""
    texts = [f"{rng.randrange(10**4):04d}" for _ in range(PROBLEMS)]
    prompts = [engine.encode(sort_prompt(text)) for text in texts]
    requests = [
        Request(prompt, rng.getrandbits(64), recipe.sampling.temperature, 6)
        for prompt in prompts
        for _ in range(SAMPLES)
    ]
    completions = engine.generate(requests, proof=recipe.proof)
    groups: list[list[Rollout]] = [[] for _ in texts]
    for i, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        group = i // SAMPLES
        is_right = engine.decode(completion.tokens).strip() == "".join(sorted(texts[group]))
        groups[group].append(
            Rollout(
                problem_id=texts[group],
                group=group,
                sample=i % SAMPLES,
                sampling_seed=request.seed,
                target_length=-1,
                policy_version=version,
                prompt_tokens=request.prompt_tokens,
                completion_tokens=completion.tokens,
                proofs=b"unused",
                task_reward=float(is_right),
            )
        )
    return groups
