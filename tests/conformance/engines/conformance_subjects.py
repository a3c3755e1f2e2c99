"""The engines under test. An entry in SUBJECTS puts an engine through the whole suite.

An engine of its own environment is named where it is installed, and is not collected elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from muster.inference.engine import InferenceEngine
from muster.inference.plan import NumberFormat
from muster.inference.transformers_engine import TransformersEngine


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine, as the suite starts it."""

    dtype: NumberFormat
    """What it computes in: float32 engines must choose the reference's tokens."""
    start: Callable[[], AbstractContextManager[InferenceEngine]]
    """Starts it without a policy; leaving the context ends it. Once per session and subject."""


def _transformers(dtype: NumberFormat, max_rows: int, *, lean: bool = True) -> Subject:
    @contextmanager
    def start() -> Iterator[InferenceEngine]:
        yield TransformersEngine(dtype, max_rows=max_rows, lean=lean)

    return Subject(dtype, start)


SUBJECTS: dict[str, Subject] = {
    "transformers-float32": _transformers("float32", 256),
    "transformers-float32-3-rows": _transformers("float32", 3),
    "transformers-float32-own-forward": _transformers("float32", 3, lean=False),
    "transformers-bfloat16": _transformers("bfloat16", 256),
    "transformers-bfloat16-3-rows": _transformers("bfloat16", 3),
}
