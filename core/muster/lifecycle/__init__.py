"""The life of a process: its limits, a free port, one main coroutine, one compute thread, a clean
stop, the variables of its children, durable files, and the addresses of machines.
"""

import asyncio
import ctypes
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from random import SystemRandom
from typing import Any, ParamSpec, TypeVar

from muster.protocol.errors import ConfigError, MusterError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that a process gets that reads texts or files of strangers."""
_FIRST_PORT, _PORT_TRIES = 20_000, 100
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_EPHEMERAL = 32_768
"""First port of the kernel's range for connections if the file is missing: Linux's default."""

CGROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files with memory limit and use, for control groups version 2 and 1."""
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Files with CPU quota and period, for control groups version 2 and 1."""

# Linux: what is monotonic stands still while the machine is suspended. On macOS it is the reverse:
# Python's monotonic clock stands still, CLOCK_MONOTONIC does not.
_COUNTS_SUSPENSION = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_PR_SET_PDEATHSIG = 1
_computing = 0
SPARE_FILES = 200
"""Open files reserved for purposes other than connections."""
MOST_TRIED = 4
"""Most addresses of one host to connect to."""


def uptime_s() -> float:
    """Return seconds of a clock that goes on while the machine is suspended: for what is due by the
    time of others.
    """
    return time.clock_gettime(_COUNTS_SUSPENSION)


class ComputeThread:
    """Runs heavy functions one at a time, off the event loop; a running function delays a stop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, partial(_counted, partial(function, *args, **kwargs))
        )

    def close(self) -> None:
        """Start no more functions; do not wait for a running one."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _counted(function: Callable[[], T]) -> T:
    global _computing
    _computing += 1
    try:
        return function()
    finally:
        _computing -= 1


def environment_without_secrets(also_passed: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of `PASSED` and `also_passed`, `LC_*` and `PYTHON*`, for a process that
    reads texts or files of strangers: no password and no token.
    """
    names = {*PASSED, *also_passed}
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(("LC_", "PYTHON"))
    }


async def run_beside(main: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, and others as long as it runs; the first error ends them all."""

    async def leading() -> None:
        try:
            await main
        finally:
            for task in beside:
                task.cancel()

    beside: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            beside += [tasks.create_task(other) for other in others]
            tasks.create_task(leading())
    except BaseExceptionGroup as group:
        # One error ended them all: callers handle that error, not a group.
        raise first_error(group) from None


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first MusterError of tasks that failed together, else their first error."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = [*error.exceptions, *pending]
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, MusterError)), leaves[0])


def run_until_stopped(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a process until its main coroutine ends, or SIGTERM or SIGINT asks it to stop.

    A stop cancels the coroutine, which closes its resources. Threads cannot be cancelled: if one is
    still computing after that, the process exits at once without waiting for it.
    """
    try:
        asyncio.run(_supervised(main))
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    if _computing:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


async def _supervised(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main())
    asked = False

    def stop() -> None:
        nonlocal asked
        asked = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not asked:
            raise
        logger.info("stopped")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def total_memory_bytes(group: Path = CGROUP) -> int:
    """Return the memory that this process could use if no other process used any."""
    import psutil

    limit, _ = _group_limit(group)
    return min(int(psutil.virtual_memory().total), limit)


def available_memory_bytes(group: Path = CGROUP) -> int:
    """Return the memory that this process could use now, within a container's limit: exceeding that
    limit kills the process.
    """
    import psutil

    limit, used = _group_limit(group)
    return max(min(int(psutil.virtual_memory().available), limit - used), 0)


def _group_limit(group: Path) -> tuple[int, int]:
    """Return the group's limit and use; without a limit, an unreachably large one."""
    for limit, used in _GROUP_FILES:
        try:
            # "max" is no number: there is no limit.
            return int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):
            continue
    return 1 << 62, 0


def usable_cores(mount: Path = CGROUP, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many CPUs this process may keep busy: those it may run on, within the quota of its
    control group and of the groups above it. At least 1; a part of a CPU does not count.
    """
    is_bound = hasattr(os, "sched_getaffinity")
    cores = float(len(os.sched_getaffinity(0)) if is_bound else os.cpu_count() or 1)
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names and "cpu" not in names.split(","):
                continue
            top = mount / "cpu" if names else mount
            # In a container the path may be the host's; its own group is then at the top.
            below = Path(path.lstrip("/"))
            cores = min(cores, *(_quota(top / each) for each in (below, *below.parents)))
    return max(1, int(cores))


def _quota(group: Path) -> float:
    """Return the CPUs that a control group may keep busy; infinite without a quota."""
    for names in _QUOTA_FILES:
        with suppress(OSError, ValueError):
            quota, period = (int(n) for f in names for n in (group / f).read_text().split())
            if quota > 0:
                return quota / period
    return math.inf


def limit_memory(size_bytes: int) -> None:
    """Bound this process's address space, and disable core dumps.

    A lower bound that was set before stays. Not for Windows.
    """
    import resource

    for limit, most in ((resource.RLIMIT_AS, size_bytes), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(limit)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (bound, bound))


def most_connections(wanted: int, *, files_each: int = 1) -> int:
    """Return how many connections this process may hold, `wanted` at most, after raising the
    system's limit of its open files. Not for Windows.

    A process without spare file descriptors accepts no connection for a second, and closes none.
    """
    import resource

    needed = wanted * files_each + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    logger.warning("the system allows fewer connections", extra={"open_files": soft})
    return max(1, (soft - SPARE_FILES) // files_each)


def die_with_parent() -> None:
    """Make the kernel end this process when its parent ends, even by SIGKILL. May run before an
    exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def sync_path(path: Path) -> None:
    """Return once a file's bytes, or a folder's names, are on the disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 for a process that will be started.

    It is below the kernel's range for outgoing connections, unless there are no other ports: on a
    busy machine a port of that range may be taken before the process listens. Raises ConfigError
    when none is found.
    """
    candidates = range(_FIRST_PORT, _first_ephemeral()) or range(_FIRST_PORT, 65_536)
    # Not from `random`: processes with the same seed would choose the same port.
    for port in SystemRandom().sample(candidates, min(_PORT_TRIES, len(candidates))):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"no port from {candidates.start} to {candidates.stop - 1} was found free",
        hint="end some of what listens there",
    )


def _first_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_EPHEMERAL


def in_turn(addresses: Iterable[str], within_s: float) -> Iterator[tuple[str, float]]:
    """Yield the addresses of a host to connect to one after the other, with the seconds for each.

    The first keeps its place; IPv4 and IPv6 alternate, since a machine may have only one of them.
    Each gets an equal share of the time that is left, so one that hangs leaves time for the next.
    """
    ends_at = time.monotonic() + within_s
    each_once = list(dict.fromkeys(addresses))
    alike = [each for each in each_once if (":" in each) == (":" in each_once[0])]
    others = [each for each in each_once if each not in alike]
    pairs = zip_longest(alike, others)
    tried = [each for pair in pairs for each in pair if each is not None][:MOST_TRIED]
    for number, address in enumerate(tried):
        yield address, (ends_at - time.monotonic()) / (len(tried) - number)


@lru_cache(maxsize=4096)
def machine_of(host: str) -> str:
    """Return the key by which limits count a machine: its IPv4 address, or the /64 of its IPv6
    address; what is no address stays as it is.

    The owner of an IPv6 address usually has its whole /64, and could use a new address per request.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)).network_address)


class Proxies:
    """The addresses and networks of trusted reverse proxies, from the settings."""

    def __init__(self, text: str = "") -> None:
        """Raises ConfigError for anything else than addresses and networks."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        try:
            self._networks = [ipaddress.ip_network(name) for name in names]
        except ValueError as error:
            raise ConfigError(
                f"trusted_proxies: {error}",
                hint="give addresses or networks, separated by commas: 10.0.0.7, 10.1.0.0/16",
            ) from error

    def __contains__(self, host: object) -> bool:
        if not self._networks:
            return False
        try:
            address = ipaddress.ip_address(str(host))
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def client_of(self, peer: str, forwarded: str) -> str:
        """Return the address behind a connection: its peer's, or if that is a proxy the last that
        is none in X-Forwarded-For; earlier ones are what a client claims.
        """
        names = [peer, *reversed([name.strip() for name in forwarded.split(",") if name.strip()])]
        return next((name for name in names if name not in self), names[-1])
