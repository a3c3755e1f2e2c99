"""One forward pass of a transformers model: logits and the hidden states behind them, together.

A hook on the head sees exactly the rows the head is given, so models that scale or cap their logits
need no special case. Axes: R rows, L width, N kept positions, H hidden units, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Forward:
    """Calls a model; made once per model, because it hooks its head."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head: torch.nn.Module = model.get_output_embeddings()
        self.head.register_forward_pre_hook(self._see)
        weight: torch.Tensor = self.head.weight
        self.vocab_size, self.hidden_size = weight.shape
        self.device = weight.device
        self._seen = torch.empty(0)

    def __call__(
        self,
        tokens_RL: npt.NDArray[np.int64],
        *,
        keep: int | torch.Tensor,
        cache: Any = None,
        mask: npt.NDArray[np.int64] | None = None,
        positions_RL: npt.NDArray[np.int64] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states [R, N, H] in the model's dtype and float32 logits [R, N, V].

        `keep` is the number of last positions wanted, or their indices. `mask` covers the cache
        and the tokens; None means nothing is padding.
        """
        output = self.model(
            input_ids=self._place(tokens_RL),
            attention_mask=self._place(mask),
            position_ids=self._place(positions_RL),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        return self._seen, output.logits.float()

    def _place(self, array: npt.NDArray[np.int64] | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array).to(self.device)

    def _see(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._seen = inputs[0]


def to_patterns(hidden: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Return hidden states as bfloat16 patterns, rounded to nearest even."""
    integers: npt.NDArray[np.int16] = (
        hidden.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
    )
    return integers.view(np.uint16)


def to_rows(hidden: torch.Tensor) -> npt.NDArray[np.uint16] | npt.NDArray[np.float32]:
    """Return hidden states as an IncrementalBuilder takes them: patterns, or floats without a copy.

    Rounding costs a step as much as the rest of proving; the builder rounds whole chunks.
    """
    if hidden.dtype == torch.float32 and hidden.device.type == "cpu":
        rows: npt.NDArray[np.float32] = hidden.numpy()
        return rows
    return to_patterns(hidden)
