"""The recipe: everything about a run that workers, validators and the trainer must agree on.

Its Keccak-256 is pinned on chain as `RunRegistry.recipeHash`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from muster.protocol.documents import Document, DocumentPart


class SamplingRecipe(DocumentPart):
    """How rollouts are generated."""

    problems_per_submission: Annotated[int, Field(ge=1, le=4096)]
    """Groups in one submission."""
    samples_per_problem: Annotated[int, Field(ge=2, le=1024)]
    """Samples in one group (G in GRPO)."""
    temperature: Annotated[float, Field(gt=0, le=10)]
    """Softmax temperature T; top-p is 1."""
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    """Limit of a completion, EOS included; also the unit cap per sample."""
    target_lengths: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Length budgets in tokens from which one is derived per problem; empty for none."""


class ProofRecipe(DocumentPart):
    """TOPLOC parameters."""

    chunk_tokens: Annotated[int, Field(ge=1, le=1024)] = 32
    """Completion tokens per proof."""
    topk: Annotated[int, Field(ge=1, le=1024)] = 128
    """Values per proof."""


class TrainingRecipe(DocumentPart):
    """The GRPO step. Defaults are INTELLECT-2's."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Training steps of the run; 0 until stopped."""
    submissions_per_step: Annotated[int, Field(ge=1)]
    """Accepted submissions that one training step consumes."""
    max_async_level: Annotated[int, Field(ge=0, le=64)] = 2
    """How many versions old a rollout's policy may be when it is trained on."""
    optimizer_steps: Annotated[int, Field(ge=1)] = 8
    """Optimiser steps per training step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-7
    """AdamW learning rate after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 25
    """Training steps of linear warm-up."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's decay of the gradient's square."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """AdamW's decoupled weight decay."""
    clip_epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Epsilon of the clipped ratio."""
    clip_delta: Annotated[float, Field(gt=1)] = 4.0
    """Upper bound of the ratio when the advantage is negative (two-sided clip)."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term to the base model."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the entropy bonus."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.1
    """Gradient clip, L2 norm over all parameters."""
    length_alpha: Annotated[float, Field(ge=0)] = 0.0003
    """Length reward is -alpha * |target - length|; unused without target lengths."""

    @model_validator(mode="after")
    def _delta_exceeds_clip(self) -> Self:
        if self.clip_delta <= 1 + self.clip_epsilon:
            raise ValueError(f"clip_delta {self.clip_delta} must exceed 1 + clip_epsilon")
        return self


class VerifierIdentity(DocumentPart):
    """Which verifier grades a task type; another one's scores may differ."""

    task_type: Annotated[str, Field(min_length=1, max_length=64)]
    """The task type."""
    name: Annotated[str, Field(min_length=1, max_length=128)]
    """The verifier's name."""
    version: Annotated[str, Field(min_length=1, max_length=64)]
    """The verifier's version."""
    code_hash: Annotated[str, Field(pattern="^0x[0-9a-f]{64}$")]
    """Keccak-256 over the verifier's source and the versions it rests on."""


class Recipe(Document):
    """A run's recipe."""

    NAME: ClassVar[str] = "recipe"
    MAX_BYTES: ClassVar[int] = 64 * 1024

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of this document's form."""
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """What people call the run."""
    sampling: SamplingRecipe
    """How rollouts are generated."""
    proof: ProofRecipe = ProofRecipe()
    """How generation is proven."""
    training: TrainingRecipe
    """How the policy learns."""
    verifiers: Annotated[tuple[VerifierIdentity, ...], Field(max_length=64)] = ()
    """Who grades, by task type; creating a run fills it in. What is not listed is not pinned."""
    allows_judge: bool = False
    """Whether the task set may hold problems whose grades validators cannot replay."""
