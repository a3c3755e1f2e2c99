"""Ports for processes that are about to be started."""

from __future__ import annotations

import socket
from pathlib import Path
from random import SystemRandom

from muster.protocol.errors import ConfigError

_FIRST = 20_000
_TRIES = 100
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_EPHEMERAL = 32_768
"""Where it says nothing else: Linux's own choice; others begin later."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nobody listens, for a process that is to be started.

    It is none of those that the kernel gives to connections, and to who asks for any, if it leaves
    others: on a busy machine such a one is gone before the process listens. Raises ConfigError when
    none is found.
    """
    candidates = range(_FIRST, _first_ephemeral()) or range(_FIRST, 65_536)
    # Not drawn from `random`: processes that were seeded alike would find the same.
    for port in SystemRandom().sample(candidates, min(_TRIES, len(candidates))):
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
