"""An input embedding whose gradient is added only to the rows that were read.

For every micro-batch autograd makes a gradient as large as the embedding: 622 MB for Qwen3-0.6B in
float32. All its rows are zero except those of the micro-batch's tokens. Here only the gradient of
these rows is made and added to the weight's gradient, and autograd gets none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from muster.trainer.learn.logprob import gradient_of


def add_rows_at_once(embedding: Any) -> None:
    """Have an embedding's gradient added row by row, in place; for weights that are leaves.

    An embedding that is not trained, or that does more than read rows, stays as it is.
    """
    is_plain = type(embedding).forward is torch.nn.Embedding.forward
    if is_plain and embedding.weight.requires_grad and not embedding.scale_grad_by_freq:
        embedding.forward = partial(_read, embedding)


def _read(embedding: torch.nn.Embedding, tokens: Tensor) -> Tensor:
    rows: Tensor = _Rows.apply(tokens, embedding.weight, embedding)  # type: ignore[no-untyped-call]  # torch's stub
    return rows


class _Rows(torch.autograd.Function):
    """Rows of a weight. Every row that was read is added once, so the sum has one order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, embedding: torch.nn.Embedding) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.embedding = embedding
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        read, places = tokens.flatten().unique(return_inverse=True)
        padding = ctx.embedding.padding_idx
        added = torch.ops.aten.embedding_dense_backward(
            gradients[0].flatten(0, -2), places, len(read), -1, False
        )
        if padding is not None:
            added[read == padding] = 0.0
        gradient_of(ctx.embedding.weight).index_add_(0, read, added)
        return None, None, None
