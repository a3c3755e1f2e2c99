"""The recipe of supervised fine-tuning: how rows of a data set become the base model of a run.

No run pins it; its Keccak-256 is in the lineage of the model that it made.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from muster.protocol.documents import Document, DocumentPart
from muster.protocol.recipe import AdapterRecipe, OptimizerRecipe, PromptRecipe


class SftRows(DocumentPart):
    """The rows of a data set that are trained on."""

    form: Literal["text", "tokens"] = "text"
    """Whether texts are rendered and encoded for the base model, or the sampled tokens are used,
    which the base model's tokenizer must decode to the same texts."""
    trained: Literal["completion", "all"] = "completion"
    """Whether the loss is over completions without replies, or over prompts as well."""
    max_tokens: Annotated[int, Field(ge=2, le=1 << 20)]
    """Most tokens of a row, prompt and completion; longer ones are left out."""
    held_out_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the problems that are held out, in addition to those of a split `test`."""


class SftTraining(OptimizerRecipe):
    """The optimiser steps."""

    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often every row is trained on."""
    order: Literal["rows", "problems"] = "rows"
    """Unit of shuffling: rows; or problems, whose rows stay together so that their prompt is
    computed once."""
    batch_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    """Mean tokens of an optimiser step, prompts included."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """AdamW learning rate after warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate schedule after warm-up."""
    final_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final value of a cosine schedule, as a share of the learning rate."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradient clip, L2 norm over all parameters."""
    seed: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    """Seed of the order of rows."""


class SftSampling(DocumentPart):
    """Sampling when the model is evaluated on problems."""

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
    """Name of the fine-tuning, for people."""
    rows: SftRows
    """The rows that are trained on."""
    prompt: PromptRecipe = PromptRecipe()
    """How prompts are made: as in the recipe of the run that follows."""
    training: SftTraining
    """The optimiser steps."""
    adapter: AdapterRecipe = AdapterRecipe()
    """Whether all weights or an adapter are trained; an adapter is merged at the end."""
    sampling: SftSampling = SftSampling()
    """How it is evaluated."""
