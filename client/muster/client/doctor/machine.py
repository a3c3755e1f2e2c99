"""The machine: processor, memory, disk, GPU, and the software that runs models."""

from __future__ import annotations

import json
import os
import platform
import shutil
import struct
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from muster.client.doctor import Line, State
from muster.client.hardware import NoDriverError, find_gpu, list_gpus
from muster.client.quantities import format_size
from muster.lifecycle import available_memory_bytes, total_memory_bytes, usable_cores
from muster.protocol.errors import EngineError, install_hint

if TYPE_CHECKING:
    from muster.client.doctor.command import Examination
    from muster.inference import InferenceEngine
    from muster.inference.loading import Dtype, EngineLoader

SECTION = "machine"
FREE_BYTES = 1 << 30
"""Free disk space needed for files that wait for their upload."""
KEPT_POLICIES = 6
"""Versions on a worker's disk: five, and the one that is being fetched."""
PACKAGES = ("torch", "transformers", "safetensors")
"""Packages of the transformers engine."""
OVERHEAD_BYTES = 768 << 20
"""Memory of torch and one batch of logits, besides the weights."""
MAX_HEADER_BYTES = 100 << 20
"""A file with a larger header is not a safetensors file."""
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1}


def examine_machine(
    state_dir: Path, device: str, threads: int, engine: str = "transformers"
) -> Iterator[Line]:
    """Yield the lines about the machine; imports no model library."""
    yield _processor(threads)
    yield _memory()
    yield _disk(state_dir)
    yield from _gpus(device)
    yield _engine()
    if engine == "vllm":
        yield _vllm()


def _processor(threads: int) -> Line:
    cores = usable_cores()
    load = os.getloadavg()[0]
    figure = f"{cores} cores ({platform.machine()}), load {load:.1f}, {threads} threads used"
    if threads > cores:
        return Line(SECTION, "cpu", State.WARN, figure, f"--threads {cores}: more are slower")
    if load > cores:
        return Line(SECTION, "cpu", State.WARN, figure, "the machine is busy with something else")
    return Line(SECTION, "cpu", State.OK, figure)


def _memory() -> Line:
    figure = f"{format_size(available_memory_bytes())} free of {format_size(total_memory_bytes())}"
    return Line(SECTION, "memory", State.OK, figure)


def _disk(state_dir: Path) -> Line:
    there = next(p for p in (state_dir, *state_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    figure = f"{format_size(free)} free in {there}"
    if free < FREE_BYTES:
        return Line(
            SECTION, "disk", State.FAIL, figure, "free some disk space, or give another --state-dir"
        )
    return Line(SECTION, "disk", State.OK, figure)


def examine_room(state_dir: Path, policy_bytes: int) -> Line:
    """Return whether the policies that a worker keeps fit on the disk."""
    there = next(p for p in (state_dir, *state_dir.absolute().parents) if p.exists())
    free, needed = shutil.disk_usage(there).free, policy_bytes * KEPT_POLICIES
    figure = f"{KEPT_POLICIES} policies take {format_size(needed)}, {format_size(free)} free"
    if needed > free:
        return Line(
            SECTION, "room", State.FAIL, figure, "free some disk space, or give another --state-dir"
        )
    return Line(SECTION, "room", State.OK, figure)


def _gpus(device: str) -> Iterator[Line]:
    """Yield a line per GPU that NVML sees; without the library, one that says how to get it."""
    wanted = device.startswith("cuda")
    try:
        found = list_gpus()
    except ImportError:
        state = State.WARN if wanted else State.SKIP
        yield Line(SECTION, "gpu", state, "not asked", install_hint("gpu"))
        return
    except NoDriverError as error:
        state = State.FAIL if wanted else State.SKIP
        yield Line(SECTION, "gpu", state, f"none: {error}", "--device cpu needs none")
        return
    for number, gpu in enumerate(found):
        room = f"{format_size(gpu.free_bytes)} free of {format_size(gpu.total_bytes)}"
        advice = "" if wanted else f"--device cuda:{number} uses it"
        yield Line(SECTION, f"gpu {number}", State.OK, f"{gpu.name}, {room}", advice)


def _engine() -> Line:
    found, missing = [f"python {platform.python_version()}"], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        figure = f"{', '.join(missing)} missing"
        return Line("software", "engine", State.FAIL, figure, install_hint("model"))
    return Line("software", "engine", State.OK, f"transformers: {', '.join(found)}")


def _vllm() -> Line:
    from muster.inference.vllm.launcher import find_python, require_usable

    try:
        python = find_python()
        found = require_usable(python)
    except EngineError as error:
        return Line("software", "vllm", State.FAIL, str(error), error.hint or "")
    return Line("software", "vllm", State.OK, f"vLLM {found}, run by {python}")


# The engine that runs the model, and the reference that checks it


def memory_needed(folder: Path, dtype: str) -> int:
    """Return the bytes of a loaded policy; 0 when its files do not tell."""
    weights = sum(_parameters(path) for path in folder.glob("*.safetensors"))
    return weights * (2 if dtype == "bfloat16" else 4) + OVERHEAD_BYTES if weights else 0


def _parameters(path: Path) -> int:
    """Return the number of weights in a safetensors file, from its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 0 < size <= MAX_HEADER_BYTES:
            return 0
        try:
            header = json.loads(file.read(size))
            entries = [v for k, v in header.items() if k != "__metadata__"]
            return sum(
                (e["data_offsets"][1] - e["data_offsets"][0]) // _WIDTHS[e["dtype"]]
                for e in entries
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(f"{path.name} is no safetensors file: {error}") from None


def examine_fit(needed: int, device: str, tensor_parallel: int = 1) -> Line:
    """Return whether a policy fits on its device, or on as many as it is spread over; `needed` is
    0 if its size is unknown.
    """
    room, needed = _free_bytes(device), -(-needed // tensor_parallel)
    figure = f"{format_size(needed)} needed" if needed else "size unknown"
    if tensor_parallel > 1:
        figure += f" on each of {tensor_parallel}"
    if room is None:
        return Line("software", "model fits", State.SKIP, f"{figure}, {device} cannot be asked")
    figure += f", {format_size(room)} free on {device}"
    if needed > room:
        advice = "close other programs, --dtype bfloat16, or a machine with more memory"
        return Line("software", "model fits", State.FAIL, figure, advice)
    return Line("software", "model fits", State.OK, figure)


def examine_context(folder: Path, asked: Examination, needed: int) -> Line:
    """Return whether the keys and values of the run's longest sample fit beside a policy."""
    context, per_token = asked.room.context or 0, cache_bytes(folder, asked.dtype)
    room = _free_bytes(asked.device)
    figure = f"{context:,} tokens"
    if not per_token or room is None:
        return Line("software", "context fits", State.SKIP, f"{figure}, their memory is unknown")
    share = asked.room.memory_share or (0.5 if asked.device == "cpu" else 0.9)
    left = int(share * room * asked.tensor_parallel) - needed
    figure += f" take {format_size(context * per_token)}, {format_size(max(left, 0))} are left"
    rows = min(left // (context * per_token), asked.room.max_rows)
    if rows < 1:
        advice = "--memory-share, --dtype bfloat16, or --context where prompts are shorter"
        return Line("software", "context fits", State.WARN, figure, advice)
    return Line("software", "context fits", State.OK, f"{figure}: {rows} samples at a time")


def cache_bytes(folder: Path, dtype: str) -> int:
    """Return the bytes of one token's keys and values; 0 when the configuration does not tell."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        kept = config.get("num_key_value_heads") or heads
        values = 2 * int(config["num_hidden_layers"]) * int(kept) * int(size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return 0
    return values * (2 if dtype == "bfloat16" else 4)


def _free_bytes(device: str) -> int | None:
    if device == "cpu":
        return available_memory_bytes()
    gpu = find_gpu(device)
    return gpu.free_bytes if gpu else None


def make_engines(
    load: EngineLoader,
    dtype: Dtype,
    device: str,
    *,
    room_bytes: int,
    folder: Path,
    load_reference: EngineLoader | None = None,
) -> tuple[InferenceEngine, InferenceEngine, str]:
    """Return the engine, the reference that checks it, and a description of the reference.

    `load_reference` makes the reference if `load` makes another kind of engine.
    """
    engine = load(dtype, device)
    if load_reference is None and (dtype, device) == ("float32", "cpu"):
        return engine, engine, "prefilled at once, as validators do"
    needed = memory_needed(folder, "float32")
    if not needed or needed > room_bytes:
        return engine, engine, "by the same engine: float32 on the CPU does not fit"
    how = "then by float32 on the CPU"
    if load_reference is None:
        return engine, load("float32", "cpu"), how
    return engine, load_reference("float32", "cpu"), f"{how}, with transformers"
