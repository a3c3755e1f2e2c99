"""The meeting of a run's sites: which of them take part in a step, and their messages.

Site 0, which publishes, keeps the store that the others connect to, and decides. A *round* is one
attempt at a training step by a fixed set of sites:

  1. call    site 0 names the members among the sites that are present (`here`, `members`)
  2. link    the members connect, and say whether they reach all others (`linked`)
  3. begin   site 0 says whether all are connected (`links`); if not, another round begins without
             the sites that died or cannot be reached, before anyone has trained
  4. agree   after the step the members say what they trained on, if they received all of it
             (`done`), and site 0 says whether it counts (`commit`)

Every site sends heartbeats. A site that is silent or late is left out, and the others take the step
again without it. Site 0 alone decides who is late: the others wait for its decisions as long as it
sends heartbeats. Every other wait has a deadline; every size is bounded, and so is the number of
rounds before a step begins. Messages go from site to site over gloo and are counted.

Every value in the store and every message carries a mark for its place: a BLAKE3 hash, keyed with a
secret that all sites derive from the trainer's key. The place names the session of site 0's store,
the round and the two sites, so no message can be replayed elsewhere. A stranger without the key who
reaches the ports can make sites wait and give up, but never make them train on forged numbers.
Marks do not encrypt: what sites exchange is published anyway.
"""

import json
import logging
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hmac import compare_digest
from ipaddress import ip_address
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stub
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
)

from muster.protocol.errors import NotYet
from muster.protocol.ids import RunId

logger = logging.getLogger(__name__)

MARK_BYTES = 32
"""Bytes of a mark."""
CONTEXT = "muster trainer sites 2"
"""Context string of the key derivation; the number is the version of the sites' protocol."""
POLL_S = 0.01
"""Seconds between two polls of the store."""
MAX_VALUE_BYTES = 1 << 16
"""Largest value in the store."""
MAX_WARNINGS = 100
"""Most warnings about values of strangers."""
REMEMBERED_ROUNDS = 64
"""Rounds whose decisions stay in the store for a late site."""
LINK_LIVES = 6
"""Time that a site may take to say whether it is connected, in multiples of `alive_s`.

Gloo's deadline is one `alive_s`; the accepting side of a connection waits five of them.
"""
LINK_HINT = (
    "sites connect on free ports: open all of them between the sites; on a VPN set "
    "GLOO_SOCKET_IFNAME to its interface at every site"
)
"""What to do when sites do not connect: gloo listens at the address that the host's name has."""


class Seal:
    """Marks messages, and tells which marks are right."""

    def __init__(self, secret: bytes) -> None:
        """`secret` has 32 bytes; the same at all sites."""
        self._secret = secret

    def mark(self, place: str, data: bytes | memoryview) -> bytes:
        """Return the mark of a message at its place."""
        named = place.encode()
        head = len(named).to_bytes(4, "big") + named
        return blake3(head, key=self._secret).update(data).digest()

    def close(self, place: str, data: bytes) -> bytes:
        """Return a message with its mark appended."""
        return data + self.mark(place, data)

    def open(self, place: str, data: bytes) -> bytes | None:
        """Return the message without its mark; None when the mark is not that of this place."""
        message, mark = data[:-MARK_BYTES], data[-MARK_BYTES:]
        return message if compare_digest(self.mark(place, message), mark) else None


def site_secret(trainer_key: bytes, run_id: RunId, chain_id: int) -> bytes:
    """Return the secret with which the sites of a run mark messages."""
    of = trainer_key + int(run_id).to_bytes(32, "big") + chain_id.to_bytes(32, "big")
    return blake3(of, derive_key_context=CONTEXT).digest()


class SiteLost(NotYet):
    """Another site of the run died, or missed a deadline; a site that starts again rejoins."""


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """This site's number, and the address at which all sites meet."""

    site: int
    """This site's number; 0 publishes."""
    host: str
    """Address at which site 0's store listens, and no other; with a name it listens at all."""
    port: int
    alive_s: float = 10.0
    """Seconds without a heartbeat after which a site counts as dead."""
    wait_s: float = 3600.0
    """Deadline in seconds at site 0 for the others' inner steps, and at each site for a message."""


Question = tuple[str, str]
"""A question to all members of a round: the key of each answer, and of site 0's conclusion."""
LINKED: Question = ("linked", "links")
"""Is the member connected to all others?"""
DONE: Question = ("done", "commit")
"""What did the member train on, if it has all it needs for the outer step?"""


class Newcomer(NamedTuple):
    """A site that wants to join."""

    site: int
    ticket: str
    """Unique to this start of the site."""
    knows: dict[str, Any]
    """The version that the site has, and the digest of its state."""


class Round:
    """One attempt at a training step, by a fixed set of sites."""

    def __init__(
        self,
        number: int,
        members: list[int],
        newcomers: list[Newcomer],
        group: Any,
        place: MeetingPlace,
        mark: Callable[[str, memoryview], bytes],
    ) -> None:
        self.number = number
        self.members = members
        self.newcomers = newcomers
        self.rank = members.index(place.site)
        self.sent_bytes = 0
        self._group: Any = group
        # A deadline per message, because that of the group is the short one for connecting.
        self._wait = timedelta(seconds=place.wait_s)
        self._mark = mark
        self._messages: Counter[str] = Counter()

    def close(self) -> None:
        """Leave the round: no member waits for a message of this site any longer."""
        self._group = None

    def start_send(self, data: Tensor, to: int) -> Callable[[], Any]:
        """Begin to send bytes to the member with this index; returns a function that waits for the
        end."""
        message = torch.cat([data, self._mark_of(data, self.rank, to)])
        self.sent_bytes += len(message)
        assert self._group is not None
        return partial(self._group.send([message], to, self.rank).wait, self._wait)

    def receive(self, size: int, sender: int) -> Tensor:
        """Return bytes from a member; raises SiteLost when they do not arrive or carry a wrong
        mark."""
        message = torch.empty(size + MARK_BYTES, dtype=torch.uint8)
        with lost_site("a message"):
            assert self._group is not None
            self._group.recv([message], sender, sender).wait(self._wait)
        data, mark = message[:size], message[size:]
        if not torch.equal(mark, self._mark_of(data, sender, self.rank)):
            raise SiteLost(
                f"a message from site {self.members[sender]} is not authentic",
                hint="let no stranger reach --site-address; give all sites the same trainer key",
            )
        return data

    def send_all(self, data: bytes, to: int) -> None:
        """Send bytes with their length first."""
        with lost_site("a site to take its state"):
            self.start_send(as_tensor(len(data).to_bytes(8, "little")), to)()
            if data:
                self.start_send(as_tensor(data), to)()

    def receive_all(self, sender: int, *, limit: int) -> bytes:
        """Receive the bytes of `send_all`; raises SiteLost above `limit` bytes."""
        size = int.from_bytes(self.receive(8, sender).numpy().tobytes(), "little")
        if size > limit:
            raise SiteLost(f"a message has {size} bytes, the limit is {limit}")
        return self.receive(size, sender).numpy().tobytes() if size else b""

    def _mark_of(self, data: Tensor, sender: int, to: int) -> Tensor:
        """Return the mark of the next message between two members."""
        way = f"{self.number}/{self.members[sender]}/{self.members[to]}"
        self._messages[way] += 1
        return as_tensor(self._mark(f"{way}/{self._messages[way]}", data.numpy().data))


class Roll:
    """The sites that site 0 calls to a round, until all called sites are connected.

    All are called at first, and a silent site is left out. If none is silent and the round still
    fails, the answers do not tell which site is to blame: two sites that cannot reach each other
    spoil the round for every member. Then sites are added one by one, those that trained before
    first, and a site whose addition makes the round fail is left out. So there are at most twice as
    many rounds as sites.
    """

    def __init__(self, sites: list[int]) -> None:
        self.called = sites
        """Members of the round; site 0 is the first."""
        self.waiting: list[int] = []
        """Sites that are called later, one by one."""
        self._is_one_by_one = False

    def leave_out(self, sites: set[int]) -> None:
        """Call these sites no more; site 0 stays, even if a stranger overwrote its answer."""
        others = [site for site in self.called[1:] if site not in sites]
        self.called = [*self.called[:1], *others]
        self.waiting = [site for site in self.waiting if site not in sites]

    def call_next(self, *, linked: bool, silent: set[int]) -> None:
        """Choose the next round's members; `linked` tells whether those of the last one
        connected."""
        if silent:
            self.leave_out(silent)
        elif not linked and self._is_one_by_one:
            logger.warning(
                "site left out: it is not connected to all others",
                extra={"site": self.called[-1], "others": self.called[:-1]},
            )
            self.leave_out({self.called[-1]})
        elif not linked:
            logger.warning("sites are called one by one", extra={"sites": self.called})
            self._is_one_by_one = True
            self.called, self.waiting = self.called[:1], self.called[1:]
        self.called, self.waiting = self.called + self.waiting[:1], self.waiting[1:]


class Meeting:
    """This site's connection to the other sites."""

    def __init__(self, place: MeetingPlace, *, expected: int, secret: bytes) -> None:
        """Connect, waiting for site 0; `expected` sites start the run together.

        `secret` authenticates the sites to one another; see `site_secret`.
        """
        self._place = place
        self._seal = Seal(secret)
        self._expected = expected
        self._members = [0]
        self._next = 0
        self._tidied = 0
        self._tickets: dict[int, str] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._done: set[str] = set()
        self._strange: set[str] = set()
        self._stopped = threading.Event()
        with lost_site("site 0's store"):
            self._store = self._connect(is_server=place.site == 0)
            # Heartbeats need their own connection: the other one blocks while it waits.
            beats = self._connect(is_server=False)
        self._ticket = uuid.uuid4().hex
        # Site 0 names the session of its store; until then the name is empty.
        self._session = ""
        if place.site == 0:
            self._set("session", self._ticket)
            self._session = self._ticket
        else:
            self._session = str(self._get("session", "site 0 to open the store"))
        threading.Thread(target=self._beat, args=(beats,), daemon=True).start()

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stopped.set()

    def ask(self, knows: dict[str, Any]) -> Round:
        """Ask to take part; returns the first round this site is in. Not for site 0."""
        request = {"ticket": self._ticket, "knows": knows}
        self._set(f"join/{self._place.site}", request)
        # The ticket belongs to this start only, so the answer and the session cannot be replayed.
        self._next = int(self._get(f"admit/{self._ticket}", "site 0 to let this site in"))
        return self.gather()

    def gather(self) -> Round:
        """Return the round of the next step, once all its members are connected.

        Raises SiteLost when site 0 is gone, or continued without this site.
        """
        if self._place.site == 0:
            return self._call()
        while (round_ := self._come()) is None:
            pass
        return round_

    def agree(self, round_: Round, *, trained_on: str | None) -> bool:
        """Tell whether every member has all it needs; else the step is taken again.

        `trained_on` names the records of this site's step, None when the site lacks something.
        Raises SiteLost when site 0 trained on other records.
        """
        # A member that still waits for this site's messages learns that none will come.
        round_.close()
        own, within_s = trained_on or "", self._place.wait_s
        counts = self._ask_all(DONE, round_.number, round_.members, own, within_s)
        if own and not counts:
            self._require_same_records(round_, own)
        if self._place.site == 0:
            self._tidy(round_.number - REMEMBERED_ROUNDS)
        return counts

    def _require_same_records(self, round_: Round, own: str) -> None:
        """Name the members that trained on other records; leave the run if they include site 0."""
        each, _ = DONE
        for site in round_.members:
            if (self._peek(f"{each}/{round_.number}/{site}") or own) == own:
                continue
            logger.error("site trained on other records", extra={"site": site})
            if site == 0:
                self.close()
                raise SiteLost(
                    f"site {self._place.site} trained on other records than site 0",
                    hint="their chain endpoints showed other blocks: give all sites the same "
                    "--confirmations, more than 0, and start this site again to rejoin",
                )

    # ------------------------------------------------------------------ site 0 decides

    def _call(self) -> Round:
        """Call sites to rounds until all members of one are connected."""
        # Read once, so that a site that restarts again and again delays a step at most once.
        newcomers = self._newcomers()
        for newcomer in newcomers:
            self._tickets[newcomer.site] = newcomer.ticket
            self._set(f"admit/{newcomer.ticket}", self._next)
        joining = [newcomer.site for newcomer in newcomers]
        staying = [s for s in self._members if s not in joining and not self._is_dead(s)]
        roll = Roll([*staying, *joining])
        while (round_ := self._try(roll, newcomers)) is None:
            pass
        self._members = round_.members
        return round_

    def _try(self, roll: Roll, newcomers: list[Newcomer]) -> Round | None:
        """Return the round of the sites on the roll; None when another round is needed."""
        number = self._next
        self._set("round", number)
        self._set(f"here/{number}/0", True)
        sites = [*roll.called, *roll.waiting]
        roll.leave_out(self._wait_for(f"here/{number}", sites, self._place.wait_s))
        joining = [newcomer for newcomer in newcomers if newcomer.site in roll.called]
        round_ = {"members": sorted(roll.called), "waiting": roll.waiting, "newcomers": joining}
        self._set(f"members/{number}", round_)
        if (begun := self._enter(round_)) is not None:
            return begun
        each, conclusion = LINKED
        silent = {s for s in roll.called if self._peek(f"{each}/{number}/{s}") is None}
        roll.call_next(linked=bool(self._peek(f"{conclusion}/{number}")), silent=silent)
        return None

    def _newcomers(self) -> list[Newcomer]:
        """Return the sites that ask to join; the first round waits for all expected ones."""
        until = time.monotonic() + (self._place.wait_s if self._next == 0 else 0)
        while True:
            asked = [self._newcomer(site) for site in range(1, self._expected)]
            found = [newcomer for newcomer in asked if newcomer is not None]
            if self._next or 1 + len(found) >= self._expected or time.monotonic() > until:
                self._done |= {n.ticket for n in found}
                return found
            time.sleep(POLL_S)

    def _newcomer(self, site: int) -> Newcomer | None:
        request = self._peek(f"join/{site}") or {"ticket": ""}
        ticket = request["ticket"]
        if not ticket or ticket in self._done or self._is_silent(ticket):
            return None
        return Newcomer(site, ticket, request["knows"])

    def _wait_for(self, prefix: str, sites: list[int], within_s: float) -> set[int]:
        """Wait until each of these sites has set its key, is dead or is late; return the dead and
        late."""
        until = time.monotonic() + within_s
        missing = set(sites)
        while missing:
            missing -= {s for s in missing if self._peek(f"{prefix}/{s}") is not None}
            if time.monotonic() > until or all(self._is_dead(site) for site in missing):
                break
            time.sleep(POLL_S)
        for site in missing:
            logger.warning("site left out", extra={"site": site, "awaited": prefix})
        return missing

    def _is_dead(self, site: int) -> bool:
        return site != 0 and self._is_silent(self._tickets[site])

    def _is_silent(self, ticket: str) -> bool:
        """Tell whether the last heartbeat of a site's start is too old."""
        now = time.monotonic()
        beat = self._peek(f"beat/{ticket}") or 0
        last, since = self._seen.get(ticket, (-1, now))
        # Beats are counted up, so a replayed beat is no sign of life.
        if beat > last:
            self._seen[ticket] = (beat, now)
            return False
        return now - since > self._place.alive_s

    def _tidy(self, before: int) -> None:
        """Delete the store's keys of rounds that no site needs any more."""
        for number in range(self._tidied, before):
            for kind in ("here", LINKED[0], DONE[0]):
                for site in range(self._expected):
                    self._store.delete_key(f"{kind}/{number}/{site}")
            for kind in ("members", LINKED[1], DONE[1]):
                self._store.delete_key(f"{kind}/{number}")
        self._tidied = max(self._tidied, before)

    # --------------------------------------------------------------------- every site

    def _come(self) -> Round | None:
        """Enter the round to which site 0 calls next; None as for `_enter`."""
        number = self._next
        self._set(f"here/{number}/{self._place.site}", True)
        return self._enter(self._get(f"members/{number}", "site 0 to begin the round", number))

    def _enter(self, value: dict[str, Any]) -> Round | None:
        """Enter a round; None when not all its sites are connected and another one follows."""
        number, site = self._next, self._place.site
        self._next += 1
        members: list[int] = value["members"]
        waiting: list[int] = value["waiting"]
        if site not in (*members, *waiting):
            raise self._left_behind()
        group = self._link(number, members) if site in members else None
        within_s = LINK_LIVES * self._place.alive_s
        linked = self._ask_all(LINKED, number, members, group is not None, within_s)
        if waiting or not linked:
            return None
        newcomers = [Newcomer(*described) for described in value["newcomers"]]
        return Round(number, members, newcomers, group, self._place, self._mark)

    def _link(self, number: int, members: list[int]) -> Any:
        """Return connections to all members; None when a member cannot be reached."""
        try:
            with lost_site("the sites of the round"):
                return ProcessGroupGloo(
                    PrefixStore(f"round/{number}", self._store),
                    members.index(self._place.site),
                    len(members),
                    timedelta(seconds=self._place.alive_s),
                )
        except SiteLost as error:
            if len(members) == 1:
                raise
            logger.warning(
                "not connected to all sites",
                extra={"round": number, "members": members, "error": str(error), "hint": LINK_HINT},
            )
            return None

    def _ask_all(
        self,
        question: Question,
        number: int,
        members: list[int],
        answer: bool | str,
        within_s: float,
    ) -> bool:
        """Answer a question; return site 0's statement whether all members gave its own answer,
        and that is neither no nor empty.

        Site 0 waits `within_s` for the answers; a site that is dead or late counts as a no.
        """
        each, conclusion = question
        self._set(f"{each}/{number}/{self._place.site}", answer)
        if self._place.site:
            return bool(self._get(f"{conclusion}/{number}", "site 0's decision", number))
        missing = self._wait_for(f"{each}/{number}", members, within_s)
        answers = [self._peek(f"{each}/{number}/{site}") for site in members]
        is_yes = bool(answer) and not missing and all(given == answer for given in answers)
        self._set(f"{conclusion}/{number}", is_yes)
        return is_yes

    def _mark(self, place: str, data: memoryview) -> bytes:
        return self._seal.mark(f"{self._session}/{place}", data)

    def _set(self, key: str, value: Any, store: TCPStore | None = None) -> None:
        data = json.dumps(value).encode()
        sealed = self._seal.close(f"{self._session}/{key}", data)
        with lost_site("the store"):
            # The type stub says str; the store takes any bytes.
            (store or self._store).set(key, sealed)  # type: ignore[arg-type]

    def _peek(self, key: str) -> Any:
        """Return a value of the store; None when it is absent or its mark is wrong."""
        with lost_site("the store"):
            if not self._store.check([key]):
                return None
            data: bytes = self._store.get(key)
        message = self._seal.open(f"{self._session}/{key}", data[:MAX_VALUE_BYTES])
        if message is None:
            # Logged once, because the store is polled.
            if len(self._strange) < MAX_WARNINGS and key not in self._strange:
                self._strange.add(key)
                logger.warning("a value that is not authentic was ignored", extra={"key": key})
            return None
        return json.loads(message)

    def _get(self, key: str, awaited: str, number: int | None = None) -> Any:
        """Wait for a value of site 0 and return it. Not for site 0.

        Raises SiteLost when site 0 is silent, or has gone on from round `number` without it.
        """
        has_gone_on = False
        while (value := self._peek(key)) is None:
            if has_gone_on:
                raise self._left_behind()
            if self._is_silent(self._session):
                raise _in_vain(awaited, f"no sign of life for {self._place.alive_s:g} s")
            # Site 0 sets what belongs to a round before it begins another.
            has_gone_on = number is not None and (self._peek("round") or 0) > number
            time.sleep(POLL_S)
        return value

    def _left_behind(self) -> SiteLost:
        return SiteLost(
            f"the run went on without site {self._place.site}",
            hint="start the site again to rejoin",
        )

    def _connect(self, *, is_server: bool) -> TCPStore:
        host, port = self._place.host, self._place.port
        return TCPStore(
            host,
            port,
            None,
            is_server,
            timedelta(seconds=self._place.wait_s),
            wait_for_workers=False,
            master_listen_fd=_listener(host, port) if is_server else None,
        )

    def _beat(self, store: TCPStore) -> None:
        count = 0
        while not self._stopped.wait(self._place.alive_s / 5):
            count += 1
            try:
                self._set(f"beat/{self._ticket}", count, store)
            except SiteLost:
                return


def _listener(host: str, port: int) -> int | None:
    """Return a socket that listens at this address alone, because torch's would listen at all
    addresses; None where the host is no single address. Raises SiteLost when it cannot listen.
    """
    try:
        address = ip_address(host)
    except ValueError:
        # The others may have another address for a name than this machine.
        hint = "give --site-address the number of the private network's address"
        logger.warning("site 0 listens at all addresses of this machine", extra={"hint": hint})
        return None
    if address.is_unspecified:
        return None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family).detach()
    except OSError as error:
        raise SiteLost(
            f"site 0 cannot listen at {host}, port {port}: {error.strerror}",
            hint="--site-address is an address of site 0's machine and a free port; if its "
            "interface is only coming up, start this site again",
        ) from error


def as_tensor(data: bytes) -> Tensor:
    """Return a copy of the bytes as a tensor."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def lost_site(awaited: str) -> Iterator[None]:
    """Turn torch's errors about a connection into SiteLost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SiteLost):
            raise
        raise _in_vain(awaited, str(error).splitlines()[0]) from error


def _in_vain(awaited: str, why: str) -> SiteLost:
    return SiteLost(
        f"waiting for {awaited} failed: {why}",
        hint="read the logs of the other sites; start this site again to rejoin",
    )
