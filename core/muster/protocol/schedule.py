"""Which validators check a batch, when more are called, and when their outcomes decide.

The rules of docs/protocol.md section 9.5. Pure: the chain's facts and time are arguments.

A batch has an *order* of the run's validators, drawn from the hash of the block that committed it.
The first `quorum` of the order are *called*. When one of them is silent for a timeout, the next one
is called too. An outcome other than Accepted, or two different sets of outcomes, is an *alarm*: it
*escalates* the batch to 2 * quorum + 1 called validators, and if they do not settle it, to all. On
chain the ledger only requires a quorum; these rules decide who checks, and when the orchestrator
posts.

Both sides compute the same from the same facts. A validator that knows only the chain uses the
batch's age alone (`called_by_age`), which calls nobody later than the rules above.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.ids import Address, Hash32, RunId

TIMEOUTS_PER_DEADLINE = 8
"""A timeout is this fraction of the outcome deadline, unless the orchestrator sets a shorter
one."""
STAGE_TIMEOUTS = 2
"""Number of timeouts after which the next stage begins by itself."""
REAUDIT_PPM = 50_000
"""Millionths of the accepted batches that one more validator checks."""
PPM = 1_000_000
_SHARE = 0
_ORDER = 1
_HISTORY = 2
_KNOWN_BATCHES = 4096
"""Batches whose draws are cached, 16 MB at most: until a batch is judged, its order is needed
repeatedly, and it never changes."""


class Stage(IntEnum):
    """How many validators a batch needs."""

    QUORUM = 0
    """As many as the ledger requires."""
    ESCALATED = 1
    """2 * quorum + 1: the validators of the first stage cannot outvote those called in this one."""
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
        """Time from which the outcomes of any quorum are posted, because later may be too late."""
        return self.committed_at + self.deadline_s - timeout_of(self.deadline_s)

    @property
    def due_at(self) -> int:
        """Time from which the ledger accepts no outcomes."""
        return self.committed_at + self.deadline_s


@dataclass(frozen=True, slots=True)
class SignedOutcomes:
    """A validator's signed outcomes of a batch."""

    validator: Address
    records_hash: Hash32
    """Keccak-256 of the records."""
    accepts: bool
    """Whether every outcome is Accepted."""
    at: int
    """Chain time at which it was delivered."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The state of a batch's calls."""

    stage: Stage
    """How many validators it needs."""
    called: tuple[Address, ...]
    """Validators that have to check it, in the order drawn."""
    silent: tuple[Address, ...]
    """Called validators that were silent for a timeout, or are known to be absent."""
    decision: Hash32 | None
    """Hash of the records to post; None while more outcomes are needed."""


def timeout_of(deadline_s: int) -> int:
    """Return the longest timeout of a call in seconds, at least 1."""
    return max(1, deadline_s // TIMEOUTS_PER_DEADLINE)


@lru_cache(_KNOWN_BATCHES)
def batch_seed(beacon: Hash32, run_id: RunId, batch_id: int, root: Hash32) -> Hash32:
    """Return the seed of a batch's draws: `keccak256(abi.encode(beacon, runId, batchId, root))`.

    For the order, `beacon` is the hash of the commitment's block. For the re-audit, it is the hash
    of the block in which the outcomes were posted, so that validators do not know beforehand
    whether a re-audit follows.
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
    """Return the order of a batch: first the validators that were seated at its commitment and
    still are, in the drawn order; then newer ones in the order of seating, because their addresses
    may have been chosen to be drawn first.
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
    """Return the place in a batch of `count` submissions that is judged by its worker's history:
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
    """Return the validators called by the batch's age alone; none once outcomes are overdue."""
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
    """Return the called validators and the decision, given the statements delivered so far.

    Statements of validators outside the order are ignored. Statements of validators that are not
    called raise the alarm like others, but count for the decision only once their validator is
    called. An `absent` validator is silent from the moment of its call, unless it delivered.

    An alarm calls more validators only when no earlier call is pending: otherwise the number of
    calls would tell pending validators what the others found. With `is_hasty` it calls at once: an
    audit needs the largest possible number of calls, and does not know who delivered when.
    """
    heard = {s.validator: s for s in statements if s.validator in order and s.at <= now}
    hearing = _Hearing(order, quorum, timing, now, heard, absent)
    stages = hearing.stage_starts(timing.committed_at if is_hasty else hearing.settled_at())
    called, silent = hearing.call(stages)
    return Calls(Stage(len(stages) - 1), called, silent, hearing.decide(called, stages))


@dataclass(frozen=True, slots=True)
class _Hearing:
    """The facts about a batch at one time."""

    order: Sequence[Address]
    quorum: int
    timing: Timing
    now: int
    heard: dict[Address, SignedOutcomes]
    """The statements of the order's validators."""
    absent: Collection[Address]

    def stage_starts(self, settled_at: int) -> list[int]:
        """Return the start of each stage that has begun."""
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
        """Return when the last of the first called validators, or of their replacements, delivered;
        beyond the deadline while one is pending.
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
        """Return the validators called so far, and those of them that are silent."""
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
            # A validator that replaced it in the meantime stays called.
            if spoke is None or spoke.at > gives_up:
                heapq.heappush(places, gives_up)
        return tuple(called), tuple(silent)

    def decide(self, called: Sequence[Address], stages: Sequence[int]) -> Hash32 | None:
        """Return the hash of the records to post; None while more outcomes are needed."""
        stage = Stage(len(stages) - 1)
        if self.now >= self.timing.last_call_at:
            return self._agreed(self.order)
        if self._alarm() is not None:
            patience = STAGE_TIMEOUTS * self.timing.timeout_s
            is_over = stage is Stage.ALL and self.now >= stages[-1] + patience
            if not is_over and not all(v in self.heard for v in self.order):
                # The quorum alone does not decide, even before more validators are called.
                return self._agreed(called, max(stage, Stage.ESCALATED))
        return self._agreed(called)

    def _alarm(self) -> int | None:
        """Return the time of the first statement that raises the alarm: it does not accept, or
        differs from the very first one.
        """
        statements = sorted(self.heard.values(), key=lambda s: (s.at, s.validator))
        for said in statements:
            if not said.accepts or said.records_hash != statements[0].records_hash:
                return said.at
        return None

    def _agreed(self, among: Sequence[Address], stage: Stage = Stage.QUORUM) -> Hash32 | None:
        """Return the hash of the records signed by a quorum of these, or in a later stage by most
        of the called. Of several, the one with most signatures wins, then the one with the first
        signer.
        """
        needed = self.quorum
        if stage is not Stage.QUORUM:
            needed = max(needed, self._size(stage) // 2 + 1)
        signed = Counter(self.heard[v].records_hash for v in among if v in self.heard)
        # A stable sort: hashes are in the order of their first signers.
        records_hash, count = next(iter(signed.most_common(1)), (None, 0))
        return records_hash if count >= needed else None

    def _gives_up(self, validator: Address, since: int) -> int:
        """Return the time at which a validator called at `since` becomes silent."""
        is_absent = validator in self.absent and validator not in self.heard
        return since if is_absent else since + self.timing.timeout_s

    def _size(self, stage: Stage) -> int:
        return size_of(stage, self.quorum, len(self.order))
