"""Activations that the backward pass computes again instead of keeping them (Chen et al. 2016,
arXiv 1604.06174).

* none: everything that a gradient needs is kept.
* selective: what is inside each block's feed-forward part is computed again: more than half of the
  activations, for less than a fifth more work.
* full: only each block's input is kept, and the block computed again: a third more work.

The same operations run again on the same numbers, so the gradient is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from muster.protocol.errors import ConfigError

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again."""


def recompute(model: Any, kind: Recompute) -> None:
    """Have a model's blocks computed again, in place, whenever a gradient is made.

    Due before the model is sharded. Raises ConfigError when it has no part of that kind.
    """
    if kind == "none":
        return
    parts = [part for block in blocks(model) for part in _parts(block, kind)]
    if not parts:
        raise ConfigError(
            f"nothing of a {type(model).__name__} can be computed again ({kind})",
            hint="--recompute none, or full",
        )
    for part in parts:
        part.forward = Again(part.forward)


def blocks(model: Any) -> list[Any]:
    """Return a model's decoder blocks."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _parts(block: Any, kind: Recompute) -> Iterator[Any]:
    if kind == "full":
        yield block
    else:
        yield from feed_forward_parts(block)


def feed_forward_parts(block: Any) -> Iterator[Any]:
    """Yield the parts of a block that have products of matrices and are not attention."""
    for name, part in block.named_children():
        has_products = any(isinstance(m, torch.nn.Linear) for m in part.modules())
        if has_products and "attn" not in name and "attention" not in name:
            yield part


class Again:
    """A forward pass of which only the inputs are kept."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return what the pass returns."""
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **options)
        # Nothing draws random numbers: dropout is off.
        return checkpoint(
            self.inner, *inputs, use_reentrant=False, preserve_rng_state=False, **options
        )
