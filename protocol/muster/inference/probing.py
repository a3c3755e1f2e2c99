"""Whether a lean decode computes what the model's own forward pass does: tried before it is used.

Axes: R rows, H hidden units.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from muster.inference.batches import pad_right
from muster.inference.forward import Forward
from muster.inference.lean_model import LeanModel, reason_against
from muster.inference.lean_rows import LeanRows

logger = logging.getLogger(__name__)

_PROMPTS = ((1, 0, 2, 5, 3), (4, 1), (1, 0, 2, 5, 3))
_NEXT = ((2, 4, 1), (3, 0, 2), (0, 1, 5))
"""Tokens that each row takes, modulo the vocabulary: two rows share a prompt, one is shorter."""

_LEAST_CONTEXT = 8


def lean_model(model: Any, forward: Forward) -> LeanModel | None:
    """Return a model's lean arithmetic, tried; None, and why in the log, where there is none."""
    if reason := reason_against(model):
        logger.info("decoding through the model's own forward pass: %s", reason)
        return None
    try:
        lean = LeanModel(model)
        error = _worst_error(lean, forward)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as failure:
        logger.warning("decoding through the model's own forward pass: %s", failure)
        return None
    # A layer computed otherwise is off by its whole size, 64 layers of bfloat16 by some percent.
    limit = 1e-3 if lean.dtype == torch.float32 else 0.1
    if not error <= limit:
        logger.warning(
            "decoding through the model's own forward pass: the lean one is off by %.2g", error
        )
        return None
    return lean


def _worst_error(lean: LeanModel, forward: Forward) -> float:
    """Return the largest relative error of any hidden state of a short decode."""
    with torch.inference_mode():
        return max(
            float((ours_H - own_H).norm() / own_H.norm()) for ours_H, own_H in _pairs(lean, forward)
        )


def _pairs(lean: LeanModel, forward: Forward) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    prompts = [tuple(t % forward.vocab_size for t in prompt) for prompt in _PROMPTS]
    lean_rows = LeanRows(lean, len(prompts), _LEAST_CONTEXT)
    rows = [list(prompt) for prompt in prompts]
    hidden, _ = lean_rows.admit(prompts)
    yield from zip(hidden.float(), _own(forward, rows), strict=True)
    for position in range(len(_NEXT[0])):
        if position == 2:
            lean_rows.keep(np.array([2, 1]))
            rows = [rows[2], rows[1]]
        for row, tokens in zip(rows, _NEXT, strict=False):
            row.append(tokens[position] % forward.vocab_size)
        hidden, _ = lean_rows.step(np.array([row[-1] for row in rows]))
        yield from zip(hidden.float(), _own(forward, rows), strict=True)


def _own(forward: Forward, rows: list[list[int]]) -> torch.Tensor:
    """Return the last hidden state [R, H] of every row, by the model itself."""
    tokens_RL = pad_right(rows)
    hidden, _ = forward(tokens_RL, keep=tokens_RL.shape[1])
    lasts = [len(row) - 1 for row in rows]
    return hidden[range(len(rows)), lasts].float()
