"""The model's words for work: what is committed, judged, disputed and paid for.

Trees are lists here and proofs say what they lead to; whether hashes, proofs and signatures are
computed alike is decided when the model is compared with the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muster.devnet.simulator.model.words import Name

ACCEPTED, INCOMPLETE, REJECTED, FRAUD = range(1, 5)
OPEN, UPHELD, OVERTURNED = 1, 2, 3
MAX_COUNT = 4096
REVEALED = "revealed"

Draw = Callable[[Sequence[int], int, Name, int], list[int]]
"""(weights, size, leaf, draw block) to the places drawn; docs/protocol.md has the rule."""


class Submission(NamedTuple):
    run: int
    worker: str
    step: int
    index: int  # type: ignore[assignment]  # over tuple.index
    version: int
    file: Any
    """What names the file: a hash, or a number that stands for one."""
    rollouts: int
    units: int


class Record(NamedTuple):
    number: int
    """The worker's."""
    step: int
    index: int  # type: ignore[assignment]  # over tuple.index
    version: int
    file: Any
    """What names the file: a hash, or a number that stands for one."""
    rollouts: int
    units: int
    verdict: int
    reason: int


class Header(NamedTuple):
    batch: int
    run: int
    root: Name
    count: int  # type: ignore[assignment]  # over tuple.count
    units: int
    price: int
    committed_at: int
    posted_at: int
    signers: int


class Proof(NamedTuple):
    """A record that is said to be at `position`, with siblings that lead from place `path`."""

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


class Work(NamedTuple):
    proof: Proof
    submission: Submission
    signer: str


class Statement(NamedTuple):
    """What a validator signs: records of a batch with this number and root."""

    batch: int
    root: Name
    records: tuple[Record, ...]


@dataclass
class Batch:
    header: Header
    submissions: tuple[Submission, ...]
    records: tuple[Record, ...] = ()
    disputed: bool = False
    recovered: set[int] = field(default_factory=set)
    overdue_units: int = 0
    """Paid without outcomes."""


@dataclass
class Case:
    challenger: str
    batch: int
    recorded: int
    claimed: int
    run: int
    opened_at: int
    draw_block: int
    status: int = OPEN
    jury: tuple[str, ...] = ()
    commitments: dict[str, Any] = field(default_factory=dict)
    overturn: int = 0
    uphold: int = 0

    @property
    def committed(self) -> int:
        return len(self.commitments)


class Standing(NamedTuple):
    record: Record
    leaf: Name
    offence: Name
    verdict: int
    closes_at: int
    is_final: bool


@dataclass
class Funds:
    available: int = 0
    reserved: int = 0
