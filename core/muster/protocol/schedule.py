"""Who checks which batch, when more are called, and when their word counts.

The rules of docs/protocol.md section 9. Pure: the chain's facts and clock come in, nobody is asked.

A batch has an *order* of the run's validators, drawn of the hash of the block that committed it.
The first `quorum` of the order are *called*. Each that is silent for a timeout calls the next one
besides. An outcome other than Accepted, or two different sets of outcomes, is an *alarm*: it
*escalates* the batch to 2 * quorum + 1 called validators, and where they do not settle it, to all.
The quorum that the ledger asks for stays the law on chain; this decides who looks, and when the
orchestrator posts.

Both sides compute the same from the same facts. A validator that knows nothing but the chain goes
by the batch's age alone (`called_by_age`), which calls nobody later than the rules above would.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.ids import Address, Hash32, RunId

TIMEOUTS_PER_DEADLINE = 8
"""A timeout is this part of the outcome deadline, unless an orchestrator has less patience."""
STAGE_TIMEOUTS = 2
"""Timeouts that a stage lasts before the next one begins by itself."""
REAUDIT_PPM = 50_000
"""Millionths of the accepted batches that one more validator checks."""
PPM = 1_000_000
_SHARE = 0
_ORDER = 1
_HISTORY = 2
_KNOWN_BATCHES = 4096
"""Batches whose draws are remembered, 16 MB at most: until one is judged, it is asked for again and
again, and no answer ever changes."""


class Stage(IntEnum):
    """How many validators a batch needs."""

    QUORUM = 0
    """As many as the ledger asks for."""
    ESCALATED = 1
    """2 * quorum + 1: those who spoke first cannot decide against all who come now."""
    ALL = 2
    """Every validator of the run."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a batch's calls time out; seconds of the chain's clock."""

    committed_at: int
    """Time of its commitment."""
    deadline_s: int
    """Seconds after the commitment by which outcomes are due on chain."""
    timeout_s: int
    """Seconds after which a called validator is silent; at most `timeout_of(deadline_s)`."""

    @property
    def last_call_at(self) -> int:
        """From when on any quorum's outcomes are posted: later may be too late."""
        return self.committed_at + self.deadline_s - timeout_of(self.deadline_s)

    @property
    def due_at(self) -> int:
        """From when on the ledger takes no outcomes."""
        return self.committed_at + self.deadline_s


@dataclass(frozen=True, slots=True)
class SignedOutcomes:
    """A validator signed outcomes of a batch."""

    validator: Address
    records_hash: Hash32
    """Keccak-256 of the records."""
    accepts: bool
    """Whether every outcome is Accepted."""
    at: int
    """Chain time at which it was handed in."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Where a batch stands."""

    stage: Stage
    """How many validators it needs."""
    called: tuple[Address, ...]
    """Who is to check it, in the order drawn."""
    silent: tuple[Address, ...]
    """Those of them that said nothing for a timeout, or are known to be absent."""
    decision: Hash32 | None
    """Hash of the records that are to be posted; None while more must be heard."""


def timeout_of(deadline_s: int) -> int:
    """Return the longest timeout of a call in seconds, at least 1."""
    return max(1, deadline_s // TIMEOUTS_PER_DEADLINE)


@lru_cache(_KNOWN_BATCHES)
def batch_seed(beacon: Hash32, run_id: RunId, batch_id: int, root: Hash32) -> Hash32:
    """Return the seed of a batch's draws: `keccak256(abi.encode(beacon, runId, batchId, root))`.

    For the order, `beacon` is the hash of the block of the commitment; for the re-audit, that of
    the block in which the outcomes were posted, so that nobody who judges knows whether it comes.
    """
    return keccak(abi_words(beacon, run_id, batch_id, root))


def draw_order(seed: Hash32, validators: Iterable[Address]) -> tuple[Address, ...]:
    """Return the validators by `keccak256(abi.encode(seed, 1, validator))`, the least first.

    Leaving a validator out changes nothing about the order of the others.
    """
    return _drawn(seed, tuple(validators))


@lru_cache(_KNOWN_BATCHES)
def _drawn(seed: Hash32, validators: tuple[Address, ...]) -> tuple[Address, ...]:
    return tuple(
        sorted(validators, key=lambda v: bytes(keccak(abi_words(seed, _ORDER, address_bytes(v)))))
    )


def order_of_batch(
    seed: Hash32, seated_then: Sequence[Address], seated_now: Sequence[Address]
) -> tuple[Address, ...]:
    """Return the order of a batch: validators seated at its commitment that still are, then those
    that came since, in the order of seating: their addresses may have been chosen to be drawn
    first.
    """
    return _ordered(seed, tuple(seated_then), tuple(seated_now))


@lru_cache(_KNOWN_BATCHES)
def _ordered(
    seed: Hash32, seated_then: tuple[Address, ...], seated_now: tuple[Address, ...]
) -> tuple[Address, ...]:
    drawn = tuple(v for v in draw_order(seed, seated_then) if v in seated_now)
    return drawn + tuple(v for v in seated_now if v not in seated_then)


@lru_cache(_KNOWN_BATCHES)
def is_reaudited(seed: Hash32, share_ppm: int = REAUDIT_PPM) -> bool:
    """Return whether an accepted batch is checked once more: the first 8 bytes of
    `keccak256(abi.encode(seed, 0))` are below that share of 2^64.
    """
    drawn = int.from_bytes(keccak(abi_words(seed, _SHARE))[:8], "big")
    return drawn * PPM < share_ppm << 64


def place_of_history(seed: Hash32, count: int) -> int:
    """Return the place of a batch of `count` submissions that is judged by its worker's history:
    the first 8 bytes of `keccak256(abi.encode(seed, 2))`, modulo the count.
    """
    return int.from_bytes(keccak(abi_words(seed, _HISTORY))[:8], "big") % count


def size_of(stage: Stage, quorum: int, validators: int) -> int:
    """Return how many are called in a stage while none is silent."""
    wanted = (quorum, 2 * quorum + 1, validators)[stage]
    return min(wanted, validators)


def stage_by_age(timing: Timing, now: int) -> Stage:
    """Return the stage that a batch without posted outcomes has reached by its age alone."""
    stages = (now - timing.committed_at) // (STAGE_TIMEOUTS * timeout_of(timing.deadline_s))
    return Stage(min(max(stages, Stage.QUORUM), Stage.ALL))


def called_by_age(
    order: Sequence[Address], quorum: int, timing: Timing, now: int
) -> Sequence[Address]:
    """Return who is called as far as the chain alone tells; nobody once it is due."""
    if now >= timing.due_at:
        return ()
    return order[: size_of(stage_by_age(timing, now), quorum, len(order))]


def plan_calls(
    order: Sequence[Address],
    quorum: int,
    timing: Timing,
    now: int,
    statements: Collection[SignedOutcomes],
    *,
    absent: Collection[Address] = (),
    is_hasty: bool = False,
) -> Calls:
    """Return who is called, and what is to be posted, given what was handed in until now.

    Statements of validators outside the order count for nothing. Those that nobody asked for raise
    the alarm like any other, but decide only once their validator is called. An `absent` validator
    is silent from the moment of its call, unless it spoke.

    An alarm calls more validators once nobody of those called before is waited for: their number
    must not tell those who have yet to speak what the others said. With `is_hasty` it calls at
    once: an audit asks how many can have been called at most, and does not know who spoke when.
    """
    heard = {s.validator: s for s in statements if s.validator in order and s.at <= now}
    hearing = _Hearing(order, quorum, timing, now, heard, absent)
    stages = hearing.stage_starts(timing.committed_at if is_hasty else hearing.settled_at())
    called, silent = hearing.call(stages)
    return Calls(Stage(len(stages) - 1), called, silent, hearing.decide(called, stages))


@dataclass(frozen=True, slots=True)
class _Hearing:
    """What is known of a batch at one time."""

    order: Sequence[Address]
    quorum: int
    timing: Timing
    now: int
    heard: dict[Address, SignedOutcomes]
    """The statements of the order's validators."""
    absent: Collection[Address]

    def stage_starts(self, settled_at: int) -> list[int]:
        """Return when each stage that has begun did."""
        begin, patience = self.timing.committed_at, STAGE_TIMEOUTS * self.timing.timeout_s
        longest = STAGE_TIMEOUTS * timeout_of(self.timing.deadline_s)
        alarm = self._alarm()
        second = min(begin + longest, begin + longest if alarm is None else max(alarm, settled_at))
        if second > self.now:
            return [begin]
        last = begin + 2 * longest
        third = min(last, last if alarm is None else second + patience)
        called, _ = self.call([begin, second])
        have_spoken = all(validator in self.heard for validator in called)
        if alarm is not None and have_spoken and self._agreed(called, Stage.ESCALATED) is None:
            third = min(third, max(second, *(self.heard[v].at for v in called)))
        return [begin, second] if third > self.now else [begin, second, third]

    def settled_at(self) -> int:
        """Return when the last validator called first spoke, or the one that took its place; beyond
        the deadline while one is waited for.
        """
        settled = self.timing.committed_at
        places = [settled] * self._size(Stage.QUORUM)
        for validator in self.order:
            if not places:
                break
            since, spoke = heapq.heappop(places), self.heard.get(validator)
            gives_up = self._gives_up(validator, since)
            if spoke is not None and spoke.at <= gives_up:
                settled = max(settled, spoke.at)
            elif gives_up > self.now:
                return self.timing.due_at
            else:
                heapq.heappush(places, gives_up)
                settled = max(settled, gives_up)
        return settled

    def call(self, stages: Sequence[int]) -> tuple[tuple[Address, ...], tuple[Address, ...]]:
        """Return who is called by now, and who of them is silent."""
        places: list[int] = []
        for stage, start in enumerate(stages):
            places += [start] * (self._size(Stage(stage)) - len(places))
        heapq.heapify(places)
        called, silent = [], []
        for validator in self.order:
            if not places or places[0] > self.now:
                break
            gives_up = self._gives_up(validator, heapq.heappop(places))
            called.append(validator)
            spoke = self.heard.get(validator)
            if spoke is None and gives_up <= self.now:
                silent.append(validator)
            # A validator that took its place in the meantime stays called.
            if spoke is None or spoke.at > gives_up:
                heapq.heappush(places, gives_up)
        return tuple(called), tuple(silent)

    def decide(self, called: Sequence[Address], stages: Sequence[int]) -> Hash32 | None:
        """Return the hash of the records to post, None while more must be heard."""
        stage = Stage(len(stages) - 1)
        if self.now >= self.timing.last_call_at:
            return self._agreed(self.order)
        if self._alarm() is not None:
            patience = STAGE_TIMEOUTS * self.timing.timeout_s
            is_over = stage is Stage.ALL and self.now >= stages[-1] + patience
            if not is_over and not all(v in self.heard for v in self.order):
                # The quorum alone does not decide, also before more are called.
                return self._agreed(called, max(stage, Stage.ESCALATED))
        return self._agreed(called)

    def _alarm(self) -> int | None:
        """Return when the first statement came that calls for more: it does not accept, or differs
        from the first of all.
        """
        statements = sorted(self.heard.values(), key=lambda s: (s.at, s.validator))
        for said in statements:
            if not said.accepts or said.records_hash != statements[0].records_hash:
                return said.at
        return None

    def _agreed(self, among: Sequence[Address], stage: Stage = Stage.QUORUM) -> Hash32 | None:
        """Return the hash of the records that a quorum of these signed, or that most of those
        called in a later stage did; of several, the most signed, then that with the first signer.
        """
        needed = self.quorum
        if stage is not Stage.QUORUM:
            needed = max(needed, self._size(stage) // 2 + 1)
        signed = Counter(self.heard[v].records_hash for v in among if v in self.heard)
        # A stable sort: hashes are in the order of their first signers.
        records_hash, count = next(iter(signed.most_common(1)), (None, 0))
        return records_hash if count >= needed else None

    def _gives_up(self, validator: Address, since: int) -> int:
        """Return until when a validator that is called at a time is waited for."""
        is_absent = validator in self.absent and validator not in self.heard
        return since if is_absent else since + self.timing.timeout_s

    def _size(self, stage: Stage) -> int:
        return size_of(stage, self.quorum, len(self.order))
