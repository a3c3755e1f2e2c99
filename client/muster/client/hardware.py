"""This machine's hardware: cores, memory, NVIDIA GPUs; and the signed report of it to a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from muster.lifecycle import total_memory_bytes, usable_cores
from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.messages import HardwareReport

if TYPE_CHECKING:
    from muster.protocol.ids import RunId
    from muster.protocol.recipe import HardwareRecipe


class Gpu(NamedTuple):
    """A GPU."""

    name: str
    """Name of the model of the GPU."""
    free_bytes: int
    """Free memory."""
    total_bytes: int
    """All of its memory."""


class NoDriverError(Exception):
    """NVML cannot list GPUs; the message says why."""


def list_gpus() -> list[Gpu]:
    """Return the GPUs, by number.

    Raises ImportError when the NVML library is missing, NoDriverError when it fails.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVML's own errors; their class differs between versions
        raise NoDriverError(str(error)) from error
    try:
        return [_gpu(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception as error:  # a GPU that was lost, or without permission to query it
        raise NoDriverError(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total))


def find_gpu(device: str) -> Gpu | None:
    """Return the GPU of a device such as `cuda:1`; None when there is none."""
    number = device.partition(":")[2].split("+")[0] or "0"
    try:
        return list_gpus()[int(number)] if number.isdecimal() else None
    except (ImportError, NoDriverError, IndexError):
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware of a machine."""

    cpu_cores: int
    """Cores that this process may use."""
    memory_mb: int
    """Main memory in MiB, within the container's limit."""
    gpu_memory_mb: tuple[int, ...]
    """Memory of each NVIDIA GPU in MiB; empty when the driver cannot be queried."""


def measure() -> Machine:
    """Return this machine's hardware; imports no model library."""
    return Machine(
        cpu_cores=usable_cores(),
        memory_mb=total_memory_bytes() >> 20,
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
    """Return the report of a machine with its node's signature."""
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
