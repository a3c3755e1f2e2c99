"""The engines under test. An entry in SUBJECTS puts an engine through the whole suite.

Engines on vLLM are collected where vLLM's environment is installed (`make vllm`), and only by
`make test-vllm` and `make test-all`: each takes a process of a gigabyte and its time to start.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from muster.inference.calibration_plan import NumberFormat
from muster.inference.engine import InferenceEngine, Room
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import ProcessEngine, VllmEngine
from muster.inference.vllm.launcher import find_python
from muster.protocol.errors import EngineError


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine, as the suite starts it."""

    dtype: NumberFormat
    """Its number format: float32 engines must choose the reference's tokens."""
    start: Callable[[str], AbstractContextManager[InferenceEngine]]
    """Starts it on a device without a policy; leaving the context ends it. Once per session and
    subject."""


def _transformers(dtype: NumberFormat, max_rows: int, *, lean: bool = True) -> Subject:
    @contextmanager
    def start(device: str) -> Iterator[InferenceEngine]:
        yield TransformersEngine(dtype, device=device, room=Room(max_rows=max_rows), lean=lean)

    return Subject(dtype, start)


def _process(made: type[ProcessEngine], dtype: NumberFormat, **options: Any) -> Subject:
    @contextmanager
    def start(device: str) -> Iterator[InferenceEngine]:
        with closing(made(dtype, device=device, **options)) as engine:
            yield engine

    return Subject(dtype, start)


def is_vllm_installed() -> bool:
    try:
        find_python()
    except EngineError:
        return False
    return True


SUBJECTS: dict[str, Subject] = {
    "transformers-float32": _transformers("float32", 256),
    "transformers-float32-3-rows": _transformers("float32", 3),
    "transformers-float32-own-forward": _transformers("float32", 3, lean=False),
    "transformers-bfloat16": _transformers("bfloat16", 256),
    "transformers-bfloat16-3-rows": _transformers("bfloat16", 3),
    "process-float32": _process(ProcessEngine, "float32"),
}
VLLM_SUBJECTS: dict[str, Subject] = {
    "vllm-float32": _process(VllmEngine, "float32"),
    # Prompts prefilled in parts, requests that wait, and a cache so small that some are preempted:
    # 8 blocks of 32 positions, one of which vLLM keeps, in 2 layers of 2 heads of 32.
    "vllm-float32-crowded": _process(
        VllmEngine,
        "float32",
        room=Room(max_rows=6, batch_tokens=24),
        cache_bytes=8 * 32 * 2 * 2 * 2 * 32 * 4,
    ),
    "vllm-bfloat16": _process(VllmEngine, "bfloat16"),
}
if is_vllm_installed():
    SUBJECTS |= VLLM_SUBJECTS
