"""What this machine has, as it is reported to a run: cores, memory, GPUs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.client.gpus import NoDriverError, list_gpus
from muster.client.memory import total_bytes
from muster.protocol.eip712 import Domain, address_of, digest, sign
from muster.protocol.messages import HardwareReport

if TYPE_CHECKING:
    from muster.protocol.ids import RunId
    from muster.protocol.recipe import HardwareRecipe


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
