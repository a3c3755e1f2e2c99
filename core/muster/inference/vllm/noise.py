"""Verifiable sampling in vLLM: a logits processor chooses, greedy selection follows it.

Specified in docs/protocol.md section 5; `muster.inference.sampling` has the arithmetic. Runs in
vLLM's process. Axes: R rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from muster.inference import sampler

ARGUMENT = "muster_sampling"
"""The extra argument of a request that holds its seed, temperature and first position."""


class _Sample(NamedTuple):
    """One row of the batch."""

    seed: int
    temperature: float
    start: int
    """Position of the first token's noise."""
    tokens: Sequence[int]
    """Tokens chosen so far; vLLM appends to this list."""


class SeededGumbel(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed beside mypy
    """Gives the token that sampling yields the largest logit, for requests that carry a seed."""

    def __init__(self, _config: Any, _device: torch.device, _is_pin_memory: bool) -> None:
        self._samples: dict[int, _Sample] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor changes which token has the largest logit."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as vLLM moves them within its batch."""
        if batch_update is None:
            return
        samples = self._samples
        for row in batch_update.removed:
            samples.pop(row, None)
        for row, params, _prompt, tokens in batch_update.added:
            samples.pop(row, None)
            if sampled := (params.extra_args or {}).get(ARGUMENT):
                seed, temperature, start = sampled
                samples[row] = _Sample(seed, temperature, start, tokens)
        for source, target, direction in batch_update.moved:
            moved, replaced = samples.pop(source, None), samples.pop(target, None)
            if moved is not None:
                samples[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                samples[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, V] with infinity at every row's next token, in place.

        A row with NaN keeps it: greedy selection and sampling both take the first.
        """
        rows = sorted(self._samples)
        if not rows:
            return logits
        samples = [self._samples[row] for row in rows]
        rows_S = torch.tensor(rows, device=logits.device)
        tokens_S = sampler.choices(
            logits if len(rows) == len(logits) else logits[rows_S],
            [s.seed for s in samples],
            [s.start + len(s.tokens) for s in samples],
            np.array([s.temperature for s in samples], np.float32),
        )
        logits[rows_S, tokens_S] = torch.inf
        return logits
