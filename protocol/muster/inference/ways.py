"""The honest matrix: ways to compute that give the same results but for rounding.

Workers generate, validators recompute; each in its own way. Whatever two honest parties may do
differently belongs here, because limits are chosen from the worst pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from muster.inference.transformers_engine import TransformersEngine

_FEW = 24
"""Samples for the ways that run one sample at a time."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute that gives the same results but for rounding."""

    name: str
    """What differs, in words."""
    max_rows: int = 256
    """Samples in a forward pass."""
    threads: int = 1
    """Threads of torch."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """The attention kernel."""
    path: Literal["prefill", "padded left", "decode"] = "prefill"
    """How a validator feeds tokens: at once, at once behind padding, or one by one with a cache."""
    lean: bool = True
    """Whether a worker decodes without the model's own forward pass, where it can."""
    samples: int | None = None
    """How many samples to spend on it; None for all."""


WORKERS = {
    "quick": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 7", max_rows=7, samples=4 * _FEW),
        Way("own forward pass", lean=False, samples=4 * _FEW),
        Way("two threads", threads=2),
    ),
    "full": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 7", max_rows=7, samples=4 * _FEW),
        Way("own forward pass", lean=False),
        Way("own, batches of 7", lean=False, max_rows=7, samples=4 * _FEW),
        Way("batches of 2", max_rows=2, samples=2 * _FEW),
        Way("two threads", threads=2),
        Way("eager attention", attention="eager"),
        Way("eager, batches of 16", attention="eager", max_rows=16, samples=4 * _FEW),
    ),
}
"""How workers generate, by profile."""

VALIDATORS = {
    "quick": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("two threads", threads=2, samples=4 * _FEW),
    ),
    "full": (
        Way("batched"),
        Way("one by one", max_rows=1, samples=_FEW),
        Way("batches of 5", max_rows=5, samples=4 * _FEW),
        Way("two threads", threads=2, samples=4 * _FEW),
        Way("eager attention", attention="eager"),
        Way("padded left", path="padded left", samples=4 * _FEW),
        Way("decoding with a cache", path="decode", samples=_FEW // 3),
    ),
}
"""How validators recompute, by profile."""


@contextmanager
def computing(engine: TransformersEngine, way: Way) -> Iterator[None]:
    """Run the body with the engine set up in a way; afterwards it is as before."""
    config = engine.model.config
    own = engine.max_rows, engine.lean, torch.get_num_threads(), config._attn_implementation
    _set_up(engine, way.max_rows, way.lean, way.threads, way.attention)
    try:
        yield
    finally:
        _set_up(engine, *own)


def _set_up(
    engine: TransformersEngine, max_rows: int, lean: bool, threads: int, attention: str
) -> None:
    engine.max_rows, engine.lean = max_rows, lean
    torch.set_num_threads(threads)
    if engine.model.config._attn_implementation != attention:
        engine.model.set_attn_implementation(attention)
