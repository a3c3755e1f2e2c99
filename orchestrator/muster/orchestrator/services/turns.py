"""Whose turn it is when more nodes ask for work than there are tickets.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with tickets as packets: each ticket of a node
starts at the later of the common clock and its own last end, and ends 1 / weight later; those who
start first are served first, and the common clock is the start of the last one served. So tickets
are shared in proportion to weights among those who ask, nobody saves up turns while away, and a
stake that is split among many nodes gets no more than in one.

Pure but for the clock that is handed in. While there is enough for all who ask, nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.protocol.ids import Address

CLEAR_S = 0.5
"""Time between two looks for who went away."""


@dataclass(slots=True)
class _Asker:
    ended: float
    """Where its last ticket ended, in turns."""
    weight: int
    asked_at: float


class Turns:
    """Shares tickets among those who ask."""

    def __init__(self, *, patience_s: float, clock: Callable[[], float]) -> None:
        """A node that has not asked for `patience_s` is not waited for."""
        self._patience_s = patience_s
        self._clock = clock
        self._waiting: dict[Address, _Asker] = {}
        self._weights: dict[Address, int] = {}
        self._ended: dict[Address, float] = {}
        self._unfit: set[Address] = set()
        self._now = 0.0
        self._cleared_at = clock()

    def ask(self, node: Address) -> None:
        """Note that a node asks while there is no ticket for anybody."""
        if node not in self._unfit:
            self._note(node)

    def withdraw(self, node: Address) -> None:
        """Note that a node may have no ticket at all: it is not waited for until it may."""
        self._waiting.pop(node, None)
        self._unfit.add(node)

    def may_go(self, node: Address, weight: int, tickets: int) -> bool:
        """Note that a node asks, and return whether one of so many tickets is its."""
        self._unfit.discard(node)
        self._weights[node] = max(1, weight)
        asker = self._note(node)
        if len(self._waiting) <= tickets:
            return True
        mine = self._turn(node, asker)
        return sum(self._turn(n, a) < mine for n, a in self._waiting.items()) < tickets

    def _note(self, node: Address) -> _Asker:
        now = self._clock()
        ended, weight = self._ended.get(node, self._now), self._weights.get(node, 1)
        self._waiting[node] = asker = _Asker(ended, weight, now)
        self._forget(now)
        return asker

    def served(self, node: Address) -> None:
        """Note that a node got a ticket."""
        asker = self._waiting.pop(node, None)
        if asker is not None:
            start = max(self._now, asker.ended)
            self._ended[node] = start + 1 / asker.weight
            self._now = start

    def _turn(self, node: Address, asker: _Asker) -> tuple[float, int, Address]:
        return max(self._now, asker.ended), -asker.weight, node

    def _forget(self, now: float) -> None:
        """Wait no more for who went away, and remember no turn that is over."""
        if now - self._cleared_at < CLEAR_S:
            return
        self._cleared_at = now
        gone = [n for n, a in self._waiting.items() if now - a.asked_at > self._patience_s]
        for node in gone:
            del self._waiting[node]
        self._ended = {n: ended for n, ended in self._ended.items() if ended > self._now}
        known = self._waiting.keys() | self._ended.keys()
        self._weights = {n: weight for n, weight in self._weights.items() if n in known}
