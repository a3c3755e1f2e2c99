"""The model's words for work: what is committed, judged, disputed and paid for.

Trees are lists here, and a proof only states whether it is intact. The differential test checks
that the contracts' hashes, proofs and signatures agree with the model.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muster.lab.simulator.model.words import NO_OFFENCE, NOBODY, Name, Place

ACCEPTED, INCOMPLETE, REJECTED, FRAUD = range(1, 5)
COMMITTED, JUDGED, WITHHELD = range(3)
OPEN, UPHELD, OVERTURNED = 1, 2, 3
UNAVAILABLE = 15
"""The reason code of a file that is not available."""
DRIFT = 71
BY_PROGRAMS = (33, 40)
"""The reason codes of a wrong reply and a wrong reward."""
MAX_COUNT = 4096
MAX_CLAIMS = 16
ANNOUNCEMENT_BLOCKS = 256
TICKET_GRACE = 60
PAID = "paid"
"""Marks a juror that collected its fee."""

Draw = Callable[[Sequence[Place], Name, int, int, int, Collection[str]], list[str]]
"""(places, case, draw block, opened at, size, excluded) to the jurors drawn; docs/protocol.md has
the rule."""


class Submission(NamedTuple):
    run: int
    worker: str
    step: int
    index: int  # type: ignore[assignment]  # over tuple.index
    version: int
    file: Any
    """Name of the file: a hash, or a number instead of one."""
    rollouts: int
    units: int

    @property
    def tag(self) -> int:
        """The number of its slot within a worker's run."""
        return self.step << 32 | self.index


class Ticket(NamedTuple):
    run: int
    worker: str
    step: int
    index: int  # type: ignore[assignment]  # over tuple.index
    version: int
    deadline: int


class Leased(NamedTuple):
    """A submission with its ticket and signatures."""

    submission: Submission
    signer: str
    ticket: Ticket
    issuer: str


class Record(NamedTuple):
    number: int
    """Number of the worker."""
    step: int
    index: int  # type: ignore[assignment]  # over tuple.index
    version: int
    file: Any
    """Name of the file: a hash, or a number instead of one."""
    rollouts: int
    units: int
    verdict: int
    reason: int

    @property
    def ruling(self) -> int:
        return self.verdict << 8 | self.reason

    @property
    def tag(self) -> int:
        """The number of its slot within a worker's run."""
        return self.step << 32 | self.index


class Header(NamedTuple):
    batch: int
    run: int
    root: Name
    count: int  # type: ignore[assignment]  # over tuple.count
    units: int
    price: int
    terms: int
    committed_at: int
    posted_at: int = 0
    signers: int = 0
    status: int = COMMITTED
    outcomes: Name | str = NO_OFFENCE
    """Root over the outcomes; no hash until they are posted."""


class Proof(NamedTuple):
    """A claim that a record is at `position`, with the siblings of place `path`."""

    header: Header
    position: int
    record: Record
    path: int
    intact: bool


class Claim(NamedTuple):
    header: Header
    positions: tuple[int, ...]
    records: tuple[Record, ...]
    intact: bool


class Statement(NamedTuple):
    """The content of a validator's signature: records of a batch with this number and root."""

    batch: int
    root: Name
    records: tuple[Record, ...]


@dataclass
class Batch:
    header: Header
    submissions: tuple[Submission, ...]
    records: tuple[Record, ...] = ()
    disputed: bool = False
    is_void: bool = False
    recovered: set[int] = field(default_factory=set)


class Made(NamedTuple):
    """A claim that was made in a case."""

    claimant: str
    ruling: int
    announced_in: int


@dataclass
class Case:
    recorded: int
    opened_at: int
    number: int
    run: int
    worker: str
    tag: int
    """Slot of the work."""
    draw_block: int
    places: int
    status: int = OPEN
    claims: list[Made] = field(default_factory=list)
    jury: tuple[str, ...] = ()
    commitments: dict[str, Any] = field(default_factory=dict)
    revealed: dict[str, int] = field(default_factory=dict)
    """Rulings, in the order in which they were revealed."""
    paid: set[str] = field(default_factory=set)
    """Jurors that collected their fee."""
    reporter: str = NOBODY
    fee: int = 0
    is_proven: bool = False
    """Whether it is proven that the batch holds the work."""
    unproven: Any = None
    """The submission that opened the case, where its claim did not prove it."""

    def spares_signers(self) -> bool:
        """Return whether honest judges may differ from the record, or from most of the votes for
        what replaced it.
        """
        ruling, votes, _ = self.leading()
        for_it = [each for each in self.revealed.values() if kind_of(each) == kind_of(ruling)]
        return may_differ(self.recorded) or 2 * sum(map(may_differ, for_it)) > votes

    def leading(self) -> tuple[int, int, bool]:
        """Return the ruling by which the kind with most votes took the lead, the votes of its kind,
        and whether another kind has as many.
        """
        votes, lead, led = list(self.revealed.values()), 0, 0
        for seen in range(1, len(votes) + 1):
            kinds = [kind_of(each) for each in votes[:seen]]
            most = max(map(kinds.count, kinds))
            if kinds.count(kinds[-1]) == most > led:
                lead = lead if led and kind_of(lead) == kinds[-1] else votes[seen - 1]
                led = most
        kinds = [kind_of(each) for each in votes]
        tied = len({each for each in kinds if kinds.count(each) == led}) > 1
        return lead, led, tied


class Standing(NamedTuple):
    record: Record
    leaf: Name
    verdict: int
    reason: int
    closes_at: int
    is_final: bool


@dataclass
class Funds:
    available: int = 0
    reserved: int = 0


def is_verdict(ruling: int) -> bool:
    return ACCEPTED <= ruling >> 8 <= FRAUD


def is_exact(ruling: int) -> bool:
    """Return whether a ruling is a fraud that one look proves."""
    return ruling >> 8 == FRAUD and 30 <= ruling & 255 <= 59


def kind_of(ruling: int) -> tuple[int, bool]:
    """Return what rulings share whose votes are counted together."""
    return (ruling >> 8, is_exact(ruling)) if is_seen(ruling) else (0, False)


def is_same(one: int, other: int) -> bool:
    """Return whether two rulings have the same consequences."""
    return one >> 8 == other >> 8 and is_exact(one) == is_exact(other)


def may_differ(ruling: int) -> bool:
    """Return whether honest judges may rule otherwise."""
    verdict, reason = ruling >> 8, ruling & 255
    if reason == DRIFT:
        return verdict != ACCEPTED
    return (10 <= reason <= 19 or reason in BY_PROGRAMS) and verdict not in (ACCEPTED, FRAUD)


def is_unavailable(ruling: int) -> bool:
    return ruling & 255 == UNAVAILABLE and may_differ(ruling)


def is_seen(ruling: int) -> bool:
    return ruling != 0 and not is_unavailable(ruling)
