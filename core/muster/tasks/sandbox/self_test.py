"""Tests the sandbox on this machine by attacking it before its first use, and reports its level. No
program runs if an attack succeeds.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, replace
from pathlib import Path

from muster.tasks.sandbox.command import Limits, find_tools
from muster.tasks.sandbox.per_run import memory_group
from muster.tasks.sandbox.sandbox import Sandbox, SandboxJob, SandboxUnavailable
from muster.tasks.sandbox.seccomp import filter_program

logger = logging.getLogger(__name__)

_LIMITS = Limits(cpu_s=5, wall_s=20.0, total_s=30.0, processes=16)
_PROBE = Path(__file__).with_name("probe.py")
AGAIN_AFTER_S = 30.0
"""Seconds until the sandbox is tested again if no attack succeeded but no program could run: a
machine short of memory or processes may recover."""


@dataclass(frozen=True, slots=True)
class Level:
    """The protections that the sandbox has on this machine."""

    sandbox: Sandbox | None
    """The sandbox; None if no safe one is available."""
    reason: str = ""
    """Why no sandbox is available."""
    may_pass: bool = False
    """Whether the reason is temporary. An attack that succeeded once is remembered for good."""
    has_own_user: bool = False
    """Whether each run has its own user id."""
    has_group_memory: bool = False
    """Whether the total memory of a run's processes is capped; else only each process's memory
    is."""
    has_call_filter: bool = False
    """Whether system calls are filtered."""
    has_bounded_files: bool = False
    """Whether the number of files that a program may make is bounded; their size always is."""

    @property
    def description(self) -> str:
        """Description of the level, for people."""
        if self.sandbox is None:
            return f"no sandbox: {self.reason}"
        parts = ["namespaces", "limits"]
        parts += ["own user id"] * self.has_own_user + ["group memory"] * self.has_group_memory
        parts += ["call filter"] * self.has_call_filter
        parts += ["bounded files"] * self.has_bounded_files
        return "sandbox with " + ", ".join(parts)


_MANY_FILES = "make 4096 folders"
"""The probe's name for the attack on the number of files."""
_UNFINISHED = "not be run to its end"


class SharedLevel:
    """The level shared by all threads of a process: a level that was reached is kept."""

    def __init__(
        self, probe: Callable[[], Level], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`probe` attacks the sandbox; `clock` returns seconds."""
        self._probe = probe
        self._clock = clock
        self._lock = threading.Lock()
        self._level: Level | None = None
        self._probed_s = 0.0

    def level(self) -> Level:
        """Return the level; probe at the first call, and again when a failure may be over."""
        with self._lock:
            if self._level is None or (
                self._level.may_pass and self._clock() - self._probed_s >= AGAIN_AFTER_S
            ):
                self._level, self._probed_s = self._probe(), self._clock()
                logger.info("sandbox probed", extra={"level": self._level.description})
            return self._level


def probe() -> Level:
    """Return the sandbox's present level, with the first bubblewrap that withstands the attacks."""
    found = find_tools()
    if isinstance(found, str):
        return Level(None, found)
    weaknesses = []
    for tools in (*found, *(replace(each, mounting=None) for each in found if each.mounting)):
        sandbox = Sandbox(tools)
        weakness = _weakness(sandbox)
        if weakness is None:
            return _level(sandbox)
        weaknesses.append(weakness)
    reasons = dict.fromkeys(reason for reason, _ in weaknesses)
    return Level(None, "; ".join(reasons), may_pass=all(passes for _, passes in weaknesses))


_shared = SharedLevel(probe)


def shared_sandbox() -> Level:
    """Return this machine's level; the first call attacks the sandbox, which takes a second."""
    return _shared.level()


def _weakness(sandbox: Sandbox) -> tuple[str, bool] | None:
    """Return why no program may run in the sandbox, and whether that is temporary; None if it
    withstood all attacks.
    """
    try:
        failures = _attack(sandbox)
    except SandboxUnavailable as error:
        return f"{error}; are user namespaces allowed here?", True
    reason = "the self-test could " + ", ".join(failures)
    return (reason, failures == [_UNFINISHED]) if failures else None


def _level(sandbox: Sandbox) -> Level:
    with memory_group(_LIMITS.group_bytes, _LIMITS.processes) as groups:
        files = ("memory.max", "memory.limit_in_bytes")
        has_group_memory = any((g.parent / name).exists() for g in groups for name in files)
    return Level(
        sandbox,
        has_own_user=os.geteuid() == 0,
        has_group_memory=has_group_memory,
        has_call_filter=filter_program() is not None,
        has_bounded_files=sandbox.tools.mounting is not None,
    )


def _attack(sandbox: Sandbox) -> list[str]:
    """Return the attacks that succeeded; an unreadable answer counts as one."""
    # In a context of its own: the level is everybody's, whatever work is given up meanwhile.
    outcome = Context().run(sandbox.run, SandboxJob(_PROBE.read_text(), ("",)), _LIMITS)
    test = outcome.tests[0]
    try:
        said = json.loads(test.out) if test else None
    except ValueError:
        said = None
    if not isinstance(said, dict) or not said:
        return [_UNFINISHED]
    succeeded = {str(name) for name, is_possible in said.items() if is_possible is not False}
    if sandbox.tools.mounting is None:
        succeeded.discard(_MANY_FILES)  # bubblewrap cannot bound their number
    return sorted(succeeded)
