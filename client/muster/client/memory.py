"""How much memory there is for this process: the machine's, or what its container leaves of it."""

from __future__ import annotations

from pathlib import Path

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
