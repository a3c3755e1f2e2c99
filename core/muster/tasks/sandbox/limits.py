"""Resource limits of a program."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run: all tests of one program."""

    cpu_s: int = 4
    """CPU time of one test, in whole seconds."""
    wall_s: float = 10.0
    """Wall-clock time of one test, in seconds."""
    total_s: float = 60.0
    """Wall-clock time of the run, in seconds."""
    memory_bytes: int = 512 << 20
    """Address space of one process."""
    group_bytes: int = 768 << 20
    """Memory of all processes and files together, if control groups can limit it."""
    processes: int = 16
    """Processes and threads at a time."""
    file_bytes: int = 1 << 20
    """Size of a file."""
    output_bytes: int = 1 << 20
    """Most bytes that one test may write."""

    @property
    def total_cpu_s(self) -> int:
        """CPU time of one process of the run."""
        return max(1, math.ceil(self.total_s))
