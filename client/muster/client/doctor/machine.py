"""The machine: processor, memory, disk, GPU, and the software that runs models."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from muster.client.doctor.lines import Line, State
from muster.client.gpus import NoDriverError, list_gpus
from muster.client.memory import available_bytes, total_bytes
from muster.client.quantities import format_size
from muster.protocol.errors import EngineError

SECTION = "machine"
FREE_BYTES = 1 << 30
"""Less free disk than this is no room for files that wait for their upload."""
KEPT_POLICIES = 6
"""Versions on a worker's disk: five, and the one that is being fetched."""
PACKAGES = ("torch", "transformers", "safetensors")
"""What the transformers engine is made of."""


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
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    figure = f"{cores} cores ({platform.machine()}), load {load:.1f}, {threads} threads used"
    if threads > cores:
        return Line(SECTION, "cpu", State.WARN, figure, f"--threads {cores}: more are slower")
    if load > cores:
        return Line(SECTION, "cpu", State.WARN, figure, "the machine is busy with something else")
    return Line(SECTION, "cpu", State.OK, figure)


def _memory() -> Line:
    figure = f"{format_size(available_bytes())} free of {format_size(total_bytes())}"
    return Line(SECTION, "memory", State.OK, figure)


def _disk(state_dir: Path) -> Line:
    there = next(p for p in (state_dir, *state_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    figure = f"{format_size(free)} free in {there}"
    if free < FREE_BYTES:
        return Line(SECTION, "disk", State.FAIL, figure, "free some, or name another --state-dir")
    return Line(SECTION, "disk", State.OK, figure)


def examine_room(state_dir: Path, policy_bytes: int) -> Line:
    """Return whether the policies that a worker keeps fit on the disk."""
    there = next(p for p in (state_dir, *state_dir.absolute().parents) if p.exists())
    free, needed = shutil.disk_usage(there).free, policy_bytes * KEPT_POLICIES
    figure = f"{KEPT_POLICIES} policies take {format_size(needed)}, {format_size(free)} free"
    if needed > free:
        return Line(SECTION, "room", State.FAIL, figure, "free some, or name another --state-dir")
    return Line(SECTION, "room", State.OK, figure)


def _gpus(device: str) -> Iterator[Line]:
    """Yield a line per GPU that NVML sees; without the library, that it was not asked."""
    wanted = device.startswith("cuda")
    try:
        found = list_gpus()
    except ImportError:
        state = State.WARN if wanted else State.SKIP
        yield Line(SECTION, "gpu", state, "not asked", "pip install 'muster-rl[gpu]' asks NVML")
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
        return Line("software", "engine", State.FAIL, figure, "pip install 'muster-rl[model]'")
    return Line("software", "engine", State.OK, f"transformers: {', '.join(found)}")


def _vllm() -> Line:
    from muster.inference.vllm.environment import find_python, require_version, version_at

    try:
        python = find_python()
        found = version_at(python)
        require_version(found)
    except EngineError as error:
        return Line("software", "vllm", State.FAIL, str(error), error.hint or "")
    return Line("software", "vllm", State.OK, f"vLLM {found}, run by {python}")
