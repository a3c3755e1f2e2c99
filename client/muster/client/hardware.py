"""What this machine has: cores, memory, NVIDIA GPUs; and how that is reported to a run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.messages import HardwareReport

if TYPE_CHECKING:
    from muster.protocol.ids import RunId
    from muster.protocol.recipe import HardwareRecipe


CGROUP = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and use, of control groups version 2 and 1."""


def total_bytes(group: Path = CGROUP) -> int:
    """Return the memory that this process could have if nothing else had any."""
    import psutil

    limit, _ = _limit(group)
    return min(int(psutil.virtual_memory().total), limit)


def available_bytes(group: Path = CGROUP) -> int:
    """Return the memory that this process could have now; a container's limit kills, it never
    swaps.
    """
    import psutil

    limit, used = _limit(group)
    return max(min(int(psutil.virtual_memory().available), limit - used), 0)


def _limit(group: Path) -> tuple[int, int]:
    """Return the group's limit and what it uses; without a limit, one that nothing reaches."""
    for limit, used in _FILES:
        try:
            # "max" is no number: there is no limit.
            return int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):
            continue
    return 1 << 62, 0


class Gpu(NamedTuple):
    """A GPU."""

    name: str
    """What its maker calls it."""
    free_bytes: int
    """Memory that nobody uses."""
    total_bytes: int
    """All of its memory."""


class NoDriverError(Exception):
    """NVML says why no GPU can be seen."""


def list_gpus() -> list[Gpu]:
    """Return the GPUs, by number.

    Raises ImportError when there is no library to ask, NoDriverError when the library cannot tell.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVML's own errors, of no class that older libraries have
        raise NoDriverError(str(error)) from error
    try:
        return [_gpu(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception as error:  # a GPU that was lost, or may not be asked
        raise NoDriverError(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total))


def find_gpu(device: str) -> Gpu | None:
    """Return the GPU that a device such as `cuda:1` names; None when none is seen there."""
    number = device.partition(":")[2].split("+")[0] or "0"
    try:
        return list_gpus()[int(number)] if number.isdecimal() else None
    except (ImportError, NoDriverError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has."""

    cpu_cores: int
    """Cores that this process may use."""
    memory_mb: int
    """Main memory in MiB, as far as a container may use it."""
    gpu_memory_mb: tuple[int, ...]
    """Memory of each NVIDIA GPU in MiB, as far as the driver can be asked."""


def measure() -> Machine:
    """Return what this machine has; asks no model library."""
    return Machine(
        cpu_cores=len(os.sched_getaffinity(0)),
        memory_mb=total_bytes() >> 20,
        gpu_memory_mb=_gpus(),
    )


def _gpus() -> tuple[int, ...]:
    try:
        return tuple(gpu.total_bytes >> 20 for gpu in list_gpus())
    except (ImportError, NoDriverError):
        return ()


def report(
    machine: Machine, run_id: RunId, key: bytes, domain: Domain
) -> tuple[HardwareReport, bytes]:
    """Return what a machine has with its node's signature."""
    said = HardwareReport(
        run_id=run_id,
        node=address_of(key),
        cpu_cores=machine.cpu_cores,
        memory_mb=machine.memory_mb,
        gpus=len(machine.gpu_memory_mb),
        gpu_memory_mb=max(machine.gpu_memory_mb, default=0),
        issued_at=int(time.time()),
    )
    return said, sign(digest(domain, said.struct_hash()), key)


def shortcomings(machine: Machine, asked: HardwareRecipe) -> list[str]:
    """Return what a machine lacks for a run, with both figures."""
    found = (
        ("memory", machine.memory_mb, asked.min_memory_mb),
        ("GPU memory", max(machine.gpu_memory_mb, default=0), asked.min_gpu_memory_mb),
    )
    return [
        f"{has} MiB of {what}, the run asks for {wants}"
        for what, has, wants in found
        if has < wants
    ]
