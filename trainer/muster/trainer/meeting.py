"""Where sites of one run meet: who takes part in a step, and messages among those.

Site 0, which publishes, keeps the store that the others connect to, and decides. A *round* is one
attempt at a training step by a fixed set of sites. Every site shows that it lives; who does not, or
does not come in time, is left out, and the others take the step again without it. Every wait has a
deadline. Messages go from site to site over gloo and are counted.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stub
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
)

from muster.protocol.errors import MusterError

logger = logging.getLogger(__name__)

POLL_S = 0.01
"""Between looks at the store."""


class SiteLost(MusterError, RuntimeError):
    """Another site of the run died, or did not come in time."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which site this is, and where they meet."""

    site: int
    """Its number; 0 publishes."""
    host: str
    """Where site 0's store listens."""
    port: int
    """Its port."""
    alive_s: float = 10.0
    """A site that has not shown itself for so long is taken for dead."""
    wait_s: float = 3600.0
    """How long sites wait for one another's inner steps, and for each message."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A site that wants to take part."""

    site: int
    """Which."""
    ticket: str
    """Unique to this start of it."""
    knows: dict[str, Any]
    """What it has already."""


class Round:
    """One attempt at a training step, by a fixed set of sites."""

    def __init__(
        self,
        number: int,
        members: list[int],
        newcomers: list[Newcomer],
        group: Any,
        rank: int,
    ) -> None:
        self.number = number
        self.members = members
        self.newcomers = newcomers
        self.rank = rank
        self.sent_bytes = 0
        self._group: Any = group

    def close(self) -> None:
        """Leave: who waits for a message of this site waits no longer."""
        self._group = None

    def start_send(self, data: Tensor, to: int) -> Any:
        """Begin to send bytes to a member, by its place among them."""
        self.sent_bytes += data.numel() * data.element_size()
        assert self._group is not None
        return self._group.send([data.contiguous()], to, self.rank)

    def receive(self, size: int, sender: int) -> Tensor:
        """Return bytes from a member; raises SiteLost when they do not come."""
        data = torch.empty(size, dtype=torch.uint8)
        with lost_site("a message"):
            assert self._group is not None
            self._group.recv([data], sender, sender).wait()
        return data

    def send_all(self, data: Tensor, to: int) -> None:
        """Send bytes of any number, with their number."""
        size = torch.tensor([data.numel()], dtype=torch.int64).view(torch.uint8)
        with lost_site("a site to take its state"):
            self.start_send(size, to).wait()
            self.start_send(data, to).wait()

    def receive_all(self, sender: int) -> Tensor:
        """Return what `send_all` sent."""
        return self.receive(int(self.receive(8, sender).view(torch.int64)), sender)


class Meeting:
    """This site's way to the others."""

    def __init__(self, place: Place, *, expected: int) -> None:
        """Connect, waiting for site 0; `expected` sites begin the run together."""
        self._place = place
        self._expected = expected
        self._members = [0]
        self._next = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._done: set[str] = set()
        self._stopped = threading.Event()
        with lost_site("site 0's store"):
            self._store = self._connect(is_server=place.site == 0)
            # A connection of its own: the other one is in use while it waits.
            beats = self._connect(is_server=False)
        self._ticket = uuid.uuid4().hex
        threading.Thread(target=self._beat, args=(beats,), daemon=True).start()

    def close(self) -> None:
        """Show no more signs of life."""
        self._stopped.set()

    def ask(self, knows: dict[str, Any]) -> Round:
        """Ask to take part; returns the first round this site is in. Not for site 0."""
        request = {"ticket": self._ticket, "knows": knows}
        self._store.set(f"join/{self._place.site}", json.dumps(request))
        self._next = int(self._get(f"admit/{self._ticket}", "site 0 to let this site in"))
        return self._form()

    def gather(self) -> Round:
        """Return the round in which the next step is taken, when all who take part are here.

        Raises SiteLost when site 0 is gone, or went on without this site.
        """
        if self._place.site:
            return self._form()
        newcomers = self._newcomers()
        members = [site for site in self._members if not self._is_dead(site)]
        members = sorted({*members, *(n.site for n in newcomers)})
        return self._call(members, newcomers)

    def agree(self, round_: Round, *, has_all: bool) -> bool:
        """Tell whether every member has all it needs: the step counts, else it is taken again."""
        # Whoever still waits for this site's messages learns that none will come.
        round_.close()
        done = f"done/{round_.number}"
        self._store.set(f"{done}/{self._place.site}", "1" if has_all else "0")
        if self._place.site == 0:
            is_complete = not self._wait_for(done, round_.members) and all(
                self._store.get(f"{done}/{site}") == b"1" for site in round_.members
            )
            self._store.set(f"commit/{round_.number}", "1" if is_complete else "0")
        return self._get(f"commit/{round_.number}", "site 0's decision") == b"1"

    # ------------------------------------------------------------------ site 0 decides

    def _call(self, members: list[int], newcomers: list[Newcomer]) -> Round:
        number = self._next
        for newcomer in newcomers:
            self._store.set(f"admit/{newcomer.ticket}", str(number))
        self._store.set(f"here/{number}/0", "1")
        missing = self._wait_for(f"here/{number}", members)
        self._members = [site for site in members if site not in missing]
        described = [(n.site, n.ticket, n.knows) for n in newcomers if n.site not in missing]
        value = json.dumps({"members": self._members, "newcomers": described})
        self._store.set(f"members/{number}", value)
        return self._form()

    def _newcomers(self) -> list[Newcomer]:
        """Return who asks to be let in; before the first round, wait for all that are expected."""
        until = time.monotonic() + (self._place.wait_s if self._next == 0 else 0)
        while True:
            found = [n for site in range(1, 256) if (n := self._newcomer(site)) is not None]
            if self._next or 1 + len(found) >= self._expected or time.monotonic() > until:
                self._done |= {n.ticket for n in found}
                return found
            time.sleep(POLL_S)

    def _newcomer(self, site: int) -> Newcomer | None:
        key = f"join/{site}"
        if site >= max(self._expected, 2) or not self._store.check([key]):
            return None
        request = json.loads(self._store.get(key))
        if request["ticket"] in self._done or self._is_dead(site):
            return None
        return Newcomer(site, request["ticket"], request["knows"])

    def _wait_for(self, prefix: str, sites: list[int]) -> set[int]:
        """Wait until these sites have set their key, are dead or late; returns the latter."""
        until = time.monotonic() + self._place.wait_s
        missing = set(sites)
        while missing:
            missing -= {s for s in missing if self._store.check([f"{prefix}/{s}"])}
            if time.monotonic() > until or all(self._is_dead(site) for site in missing):
                break
            time.sleep(POLL_S)
        for site in missing:
            logger.warning("site left out", extra={"site": site, "awaited": prefix})
        return missing

    def _is_dead(self, site: int) -> bool:
        if site == 0:
            return False
        now = time.monotonic()
        key = f"beat/{site}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        last, since = self._seen.get(site, (b"", now))
        if beat != last or site not in self._seen:
            self._seen[site] = (beat, now)
            return False
        return now - since > self._place.alive_s

    # --------------------------------------------------------------------- every site

    def _form(self) -> Round:
        """Come to the next round and connect to its members."""
        number, site = self._next, self._place.site
        self._next += 1
        self._store.set(f"here/{number}/{site}", "1")
        value = json.loads(self._get(f"members/{number}", "site 0 to begin the round"))
        members: list[int] = value["members"]
        if site not in members:
            raise SiteLost(
                f"the run went on without site {site}", hint="start the site again to rejoin"
            )
        rank = members.index(site)
        with lost_site("the sites of the round"):
            group = ProcessGroupGloo(
                PrefixStore(f"round/{number}", self._store),
                rank,
                len(members),
                timedelta(seconds=self._place.wait_s),
            )
        newcomers = [Newcomer(*described) for described in value["newcomers"]]
        return Round(number, members, newcomers, group, rank)

    def _get(self, key: str, awaited: str) -> bytes:
        until = time.monotonic() + self._place.wait_s
        with lost_site(awaited):
            while not self._store.check([key]):
                if time.monotonic() > until:
                    raise RuntimeError(f"nothing for {self._place.wait_s:g} s")
                time.sleep(POLL_S)
            value: bytes = self._store.get(key)
        return value

    def _connect(self, *, is_server: bool) -> TCPStore:
        timeout = timedelta(seconds=self._place.wait_s)
        return TCPStore(
            self._place.host, self._place.port, None, is_server, timeout, wait_for_workers=False
        )

    def _beat(self, store: TCPStore) -> None:
        count = 0
        while not self._stopped.wait(self._place.alive_s / 5):
            count += 1
            try:
                store.set(f"beat/{self._place.site}", str(count))
            except RuntimeError:
                return


@contextmanager
def lost_site(awaited: str) -> Iterator[None]:
    """Turn what torch says about a connection into SiteLost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SiteLost):
            raise
        raise SiteLost(
            f"waited in vain for {awaited}: {str(error).splitlines()[0]}",
            hint="look at the other sites; a site that is started again rejoins",
        ) from error
