"""What the decode loop asks of whatever holds the rows that are being generated.

Axes: R rows, H hidden units, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Predicted: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [R, H] in the model's format and float32 logits [R, V], one row per sample."""


class DecodingRows(Protocol):
    """Keys and values of the samples that are being generated, in rows 0 to R - 1."""

    def room(self) -> int:
        """Return how many samples may be admitted now."""

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Append a row per prompt; return what predicts their first tokens."""

    def step(self, tokens_R: npt.NDArray[np.int64]) -> Predicted:
        """Take one more token per row; return what predicts the next."""

    def keep(self, order: npt.NDArray[np.int64]) -> None:
        """Row i becomes what row `order[i]` was; the others are dropped."""
