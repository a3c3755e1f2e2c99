"""User ids that nobody uses: one for each program that runs, so that none can signal another.

An id is held by an abstract socket of its name, which the kernel frees when its process ends,
however it ends: processes of one machine share the ids without a file.
"""

from __future__ import annotations

import os
import pwd
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_ID = 64_000
"""Ids from here; within what user namespaces of containers usually map."""
IDS = 1000
"""How many are tried."""


@contextmanager
def unused_id() -> Iterator[int | None]:
    """Yield a user id that is nobody's while this holds it; None when this process is not root.

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
    # Drawn: a killed run's processes count against its id until the kernel has buried them.
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
