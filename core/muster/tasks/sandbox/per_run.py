"""Resources of each run: its control group, and a user id that nobody else uses.

The control group (version 1, a hierarchy per controller, or version 2) caps memory and processes of
the whole run, if this process may set a cap. It is below this process's own group, so that this
process's limits still apply, and is removed when the run ends.

With its own user id no program can signal another. An abstract socket named after the id reserves
it. The kernel frees the socket when its process ends, however it ends, so the processes of one
machine share the ids without a file.
"""

import logging
import os
import pwd
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_MOUNT = Path("/sys/fs/cgroup")
_REMOVAL_S = 5.0
"""Seconds that a group's processes may take to end after they are killed."""
_ALMOST_BYTES = 1 << 20
"""A peak of at least this share of a cap counts as reaching it."""

LimitFiles = tuple[tuple[str, str], ...]
"""Files of a group and what to write to each; names that end in "?" may be missing."""


@contextmanager
def memory_group(memory_bytes: int, processes: int) -> Iterator[list[Path]]:
    """Yield the files to which a process writes "0" to join; none without the permission."""
    values = {"memory": str(memory_bytes), "none": "0", "processes": str(processes)}
    made = [_make(parent, limits, values) for parent, limits in _parents()]
    groups = [group for group in made if group is not None]
    try:
        yield [group / "cgroup.procs" for group in groups]
    finally:
        for group in groups:
            _remove(group)


def has_met_limit(groups: Sequence[Path]) -> bool:
    """Return whether a run reached its memory cap; its groups are those of `memory_group`."""
    pairs = (
        ("memory.max_usage_in_bytes", "memory.limit_in_bytes"),  # version 1
        ("memory.peak", "memory.max"),
    )
    return any(
        _number(file.parent / peak) >= _number(file.parent / cap) - _ALMOST_BYTES
        for file in groups
        for peak, cap in pairs
        if (file.parent / peak).exists()
    )


def _number(path: Path) -> int:
    return int(path.read_text())


def _make(parent: Path, limits: LimitFiles, values: dict[str, str]) -> Path | None:
    group = parent / f"muster-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        for name, kind in limits:
            if name.endswith("?") and not (group / name[:-1]).exists():
                continue
            (group / name.rstrip("?")).write_text(values[kind])
    except OSError:
        _remove(group)
        return None
    return group


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            # Killed processes leave the group only when the kernel has freed them.
            time.sleep(0.001)
        else:
            return
    logger.warning("control group left behind", extra={"group": str(group)})


def _sweep(parent: Path) -> None:
    """Remove the empty groups of processes that were killed before they could."""
    for group in parent.glob("muster-*-*"):
        pid = group.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):
                group.rmdir()


@cache
def _parents() -> tuple[tuple[Path, LimitFiles], ...]:
    """Return this process's own groups with the limit files of groups below; leftovers are removed
    once.
    """
    found = _own_groups()
    for parent, _ in found:
        _sweep(parent)
    return found


def _own_groups() -> tuple[tuple[Path, LimitFiles], ...]:
    if os.geteuid() != 0:
        return ()
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    own: dict[str, str] = {}
    for line in lines:
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    if (_MOUNT / "cgroup.controllers").exists():
        limits = (("memory.max", "memory"), ("memory.swap.max?", "none"), ("pids.max", "processes"))
        return ((_MOUNT / own.get("", "/").lstrip("/"), limits),)
    found: list[tuple[Path, LimitFiles]] = []
    if "memory" in own:
        limits_of_memory = (
            ("memory.limit_in_bytes", "memory"),
            ("memory.memsw.limit_in_bytes?", "memory"),
        )
        found.append((_MOUNT / "memory" / own["memory"].lstrip("/"), limits_of_memory))
    if "pids" in own:
        found.append((_MOUNT / "pids" / own["pids"].lstrip("/"), (("pids.max", "processes"),)))
    return tuple(found)


# User ids


FIRST_ID = 64_000
"""First id; within the range that user namespaces of containers usually map."""
IDS = 1000
"""Number of ids."""


@contextmanager
def unused_id() -> Iterator[int | None]:
    """Yield a user id that nobody else uses inside the block; None when this process is not root.

    Raises OSError when all of them are taken.
    """
    if os.geteuid() != 0:
        yield None
        return
    held, found = _hold()
    try:
        yield found
    finally:
        held.close()


def _hold() -> tuple[socket.socket, int]:
    # Random: processes of a killed run count for its id until the kernel has freed them.
    start = secrets.randbelow(IDS)
    for offset in range(IDS):
        candidate = FIRST_ID + (start + offset) % IDS
        if _is_somebodys(candidate):
            continue
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0muster-sandbox-{candidate}")
        except OSError:
            holder.close()
            continue
        return holder, candidate
    raise OSError(f"all {IDS} user ids from {FIRST_ID} are taken")


def _is_somebodys(user_id: int) -> bool:
    try:
        pwd.getpwuid(user_id)
    except KeyError:
        return False
    return True
