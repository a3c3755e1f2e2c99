"""The machine: processor, memory, disk, GPU, and the software that runs models."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from muster.client.doctor.lines import Line, State
from muster.client.quantities import format_size

SECTION = "machine"
FREE_BYTES = 1 << 30
"""Less free disk than this is no room for files that wait for their upload."""
PACKAGES = ("torch", "transformers", "safetensors")
"""What the transformers engine is made of."""


def examine_machine(state_dir: Path, device: str, threads: int) -> Iterator[Line]:
    """Yield the lines about the machine; imports no model library."""
    yield _processor(threads)
    yield _memory()
    yield _disk(state_dir)
    yield from _gpus(device)
    yield _engine()


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
    import psutil

    memory = psutil.virtual_memory()
    figure = f"{format_size(memory.available)} free of {format_size(memory.total)}"
    return Line(SECTION, "memory", State.OK, figure)


def _disk(state_dir: Path) -> Line:
    there = next(p for p in (state_dir, *state_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    figure = f"{format_size(free)} free in {there}"
    if free < FREE_BYTES:
        return Line(SECTION, "disk", State.FAIL, figure, "free some, or name another --state-dir")
    return Line(SECTION, "disk", State.OK, figure)


def _gpus(device: str) -> Iterator[Line]:
    """Yield a line per GPU that NVML sees; without the library, that it was not asked."""
    wanted = device.startswith("cuda")
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        state = State.WARN if wanted else State.SKIP
        yield Line(SECTION, "gpu", state, "not asked", "pip install 'muster-rl[gpu]' asks NVML")
        return
    except Exception as error:  # NVML's own errors: no driver, no permission
        state = State.FAIL if wanted else State.SKIP
        yield Line(SECTION, "gpu", state, f"none: {error}", "--device cpu needs none")
        return
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            figure = f"{name}, {format_size(memory.free)} free of {format_size(memory.total)}"
            advice = "" if wanted else f"--device cuda:{number} uses it"
            yield Line(SECTION, f"gpu {number}", State.OK, figure, advice)
    finally:
        pynvml.nvmlShutdown()


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
