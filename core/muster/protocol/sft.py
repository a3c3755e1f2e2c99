"""The recipe of supervised fine-tuning: how rows of a data set become the base model of a run.

No run pins it; its Keccak-256 is in the lineage of the model that it made.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from muster.protocol.documents import Document, DocumentPart
from muster.protocol.recipe import AdapterRecipe, OptimizerRecipe, PromptRecipe


class SftRows(DocumentPart):
    """What of a data set is trained on."""

    form: Literal["text", "tokens"] = "text"
    """Whether texts are rendered and encoded for the base model, or the tokens are taken that were
    sampled, which the base model's tokenizer must read as the same texts."""
    trained: Literal["completion", "all"] = "completion"
    """Whether the loss is over completions, replies left out, or over prompts as well."""
    max_tokens: Annotated[int, Field(ge=2, le=1 << 20)]
    """Most tokens of a row, prompt and completion; longer ones are left out."""
    held_out_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the problems that are held out, beside those of a split `test`."""


class SftTraining(OptimizerRecipe):
    """The optimiser steps."""

    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often every row is trained on."""
    order: Literal["rows", "problems"] = "rows"
    """What is shuffled: rows; or problems, whose rows then come together, so that their prompt is
    computed once."""
    batch_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    """Mean tokens of an optimiser step, prompts included."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """AdamW learning rate after warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What the learning rate does after warm-up."""
    final_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where a cosine ends, as a share of the learning rate."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient clip, L2 norm over all parameters."""
    seed: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    """Decides in which order rows come."""


class SftSampling(DocumentPart):
    """How the model is asked when it is evaluated on problems."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Softmax temperature."""
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Limit of a completion."""


class SftRecipe(Document):
    """The recipe of a fine-tuning."""

    NAME: ClassVar[str] = "sft recipe"
    MAX_BYTES: ClassVar[int] = 64 * 1024

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of this document's form."""
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """What people call it."""
    rows: SftRows
    """What is trained on."""
    prompt: PromptRecipe = PromptRecipe()
    """What the model reads: as in the recipe of the run that comes after."""
    training: SftTraining
    """How it is trained on."""
    adapter: AdapterRecipe = AdapterRecipe()
    """What of the model is trained; an adapter is merged in at the end."""
    sampling: SftSampling = SftSampling()
    """How it is evaluated."""
