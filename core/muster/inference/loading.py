"""Engines by their names in flags and settings. Making one imports its modules."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from muster.inference.engine import ROOM, InferenceEngine, Room
from muster.protocol.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
"""Number format of a model's arithmetic."""
EngineLoader = Callable[[Dtype, str], InferenceEngine]
"""Makes an engine for a number format and a device. Imports torch: call it off the event loop."""


def engine_of(options: Mapping[str, Any], *, silence_s: float | None = None) -> InferenceEngine:
    """Return the engine that the flags of `engine_choice` name; raises ConfigError. With
    `silence_s`, transformers is in a process of its own, too, which is started again after so many
    seconds without a sign of life.
    """
    engine, threads = options["engine"] or "transformers", options["threads"] or 1
    if engine == "transformers" and silence_s is not None:
        load = load_transformers(threads, is_apart=True, silence_s=silence_s)
    else:
        load = load_as(engine, threads)
    return load(options["dtype"] or "float32", options["device"] or "cpu")


def load_as(engine: str, threads: int, room: Room = ROOM, tensor_parallel: int = 1) -> EngineLoader:
    """Return the loader of an engine, by the engine's name."""
    if engine != "vllm":
        return load_transformers(threads, room)

    def load(dtype: Dtype, device: str) -> InferenceEngine:
        from muster.inference.vllm.engine import VllmEngine

        return VllmEngine(
            dtype, threads=threads, device=device, room=room, tensor_parallel=tensor_parallel
        )

    return load


def load_transformers(
    threads: int, room: Room = ROOM, *, is_apart: bool = False, silence_s: float | None = None
) -> EngineLoader:
    """Return the loader of transformers, which runs any Hugging Face causal language model; it is
    apart in a process of its own, beside others of the same worker. `silence_s` replaces the
    seconds after which such a process that says nothing is started again.
    """

    def load(dtype: Dtype, device: str) -> InferenceEngine:
        require_device(device)
        if is_apart:
            from muster.inference.vllm.engine import Patience, ProcessEngine

            patience = Patience() if silence_s is None else Patience(silence_s=silence_s)
            return ProcessEngine(
                dtype, threads=threads, device=device, room=room, patience=patience
            )
        from muster.inference.transformers_engine import TransformersEngine

        return TransformersEngine(dtype, threads=threads, device=device, room=room)

    return load


def require_device(device: str) -> None:
    """Raise ConfigError when torch cannot compute on a device, as it is named to torch.

    Makes no CUDA context: it would keep several hundred MB of the GPU until this process ends, and
    the engine's own process needs another.
    """
    import torch

    try:
        place = torch.device(device)
        if place.type != "cuda":
            torch.empty(1, device=place)
            return
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            raise RuntimeError(f"it finds {count} GPUs")
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"torch cannot compute on {device!r}: {str(error).splitlines()[0]}",
            hint="cpu works everywhere; cuda needs NVIDIA's driver and a torch built for it",
        ) from error
