"""Training in one process: the demo's model and task, the real engine and learner, no network."""

import random
from collections.abc import Iterator
from pathlib import Path

from trainer_fakes import EOS

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.tasks.toys import sort_prompt
from muster.trainer.learn.learner import Learner
from muster.trainer.measure.figures import StepFigures
from muster.trainer.publish.policies import PolicyShelf


def practice_recipe(*, problems: int = 16, samples: int = 8, **training: object) -> Recipe:
    """The demo's recipe with smaller steps."""
    values: dict[str, object] = {
        "submissions_per_step": 1,
        "optimizer_steps": 1,
        "learning_rate": 7e-4,
        "warmup_steps": 2,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "kl_coefficient": 0.0,
        "entropy_coefficient": 0.0,
    }
    sampling = SamplingRecipe(
        problems_per_submission=problems,
        samples_per_problem=samples,
        temperature=1.0,
        max_new_tokens=6,
    )
    training_recipe = TrainingRecipe.model_validate({**values, **training})
    return Recipe(name="practice", sampling=sampling, training=training_recipe)


class Practice:
    """A policy that learns from its own samples, step by step."""

    def __init__(self, model: Path, folder: Path, recipe: Recipe, *, seed: int = 0) -> None:
        self._recipe = recipe
        self._rng = random.Random(seed)
        self._engine = TransformersEngine("float32")
        self.shelf = PolicyShelf(folder)
        self.shelf.adopt(model)
        self.learner = Learner(model, recipe, published=self.shelf.weights)

    def steps(self, count: int) -> Iterator[StepFigures]:
        """Sample with the newest version, take a step, write the next version."""
        for number in range(1, count + 1):
            version = PolicyVersion(number - 1)
            self._engine.load_policy(self.shelf.path(version), version)
            figures = self.learner.step(Step(number), self.rollouts(version))
            self.shelf.write(PolicyVersion(number), self.learner.weights())
            self.shelf.drop_before(version)
            yield figures

    def rollouts(self, version: PolicyVersion) -> list[list[Rollout]]:
        """Return graded samples of the policy that is loaded, group by group."""
        sampling = self._recipe.sampling
        texts = [
            f"{self._rng.randrange(10**4):04d}" for _ in range(sampling.problems_per_submission)
        ]
        prompts = [self._engine.encode(sort_prompt(text)) for text in texts]
        requests = [
            Request(
                prompt, self._rng.getrandbits(64), sampling.temperature, sampling.max_new_tokens
            )
            for prompt in prompts
            for _ in range(sampling.samples_per_problem)
        ]
        completions = self._engine.generate(requests, proof=self._recipe.proof)
        groups: list[list[Rollout]] = [[] for _ in texts]
        for i, (request, completion) in enumerate(zip(requests, completions, strict=True)):
            group, sample = divmod(i, sampling.samples_per_problem)
            answer = self._engine.decode(tuple(t for t in completion.tokens if t != EOS))
            groups[group].append(
                Rollout(
                    problem_id=texts[group],
                    group=group,
                    sample=sample,
                    sampling_seed=request.seed,
                    target_length=-1,
                    policy_version=version,
                    prompt_tokens=request.prompt_tokens,
                    completion_tokens=completion.tokens,
                    proofs=b"unused",
                    task_reward=float(answer == "".join(sorted(texts[group]))),
                )
            )
        return groups
