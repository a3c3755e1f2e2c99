"""Cases: rulings, the draw of jurors, and how claims and votes are hidden until they count.

The rules of docs/protocol.md section 9.6; the contracts JuryPool and DisputeCourt implement the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Reason, Verdict
from muster.protocol.reasons import GRADED

BENCH = 0
"""The run id under which jurors stake."""
MAX_TRIES = 512
"""Most places that a draw tries."""
_SUMMONS = b"muster.summons"
_EXACT_REASONS = range(30, 60)
_MAY_DIFFER = {*range(10, 20), *GRADED}


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict with its reason, as recorded, claimed or voted for."""

    verdict: Verdict
    reason: Reason

    @property
    def number(self) -> int:
        """The ruling's number in contracts: `verdict << 8 | reason`. uint16."""
        return int(self.verdict) << 8 | int(self.reason)

    @property
    def is_exact(self) -> bool:
        """Whether it is a fraud that a single check proves."""
        return is_exact(self.number)

    @classmethod
    def of(cls, number: int) -> Self | None:
        """Return the ruling with a number; None for 0: no data was seen, or no outcome recorded.

        Raises EncodingError when there is no such verdict or reason.
        """
        if number == 0:
            return None
        try:
            return cls(Verdict(number >> 8), Reason(number & 0xFF))
        except ValueError as error:
            raise EncodingError(f"{number} is no ruling") from error

    def is_same(self, other: Ruling) -> bool:
        """Return whether another ruling has the same consequences."""
        return is_same(self.number, other.number)

    def __str__(self) -> str:
        if self.reason is Reason.NONE:
            return self.verdict.name.lower()
        return f"{self.verdict.name.lower()} for {self.reason.name.lower()}"


# By number, because jurors may vote for an unknown reason.


def is_exact(ruling: int) -> bool:
    """Return whether a ruling is a fraud that a single check proves."""
    return ruling >> 8 == Verdict.FRAUD and ruling & 0xFF in _EXACT_REASONS


def is_same(a: int, b: int) -> bool:
    """Return whether two rulings have the same consequences."""
    return a >> 8 == b >> 8 and is_exact(a) == is_exact(b)


def may_differ(ruling: int) -> bool:
    """Return whether honest judges may rule otherwise. The ruling depends on what the committer of
    the batch showed (a reason of check 1), on the worker's earlier work, or on where and when a
    program ran.
    """
    verdict, reason = ruling >> 8, ruling & 0xFF
    if reason == Reason.SAMPLER_DRIFT:
        return verdict != Verdict.ACCEPTED
    return verdict not in (Verdict.ACCEPTED, Verdict.FRAUD) and reason in _MAY_DIFFER


def rests_on_program(ruling: int) -> bool:
    """Return whether a ruling depends on where and when a program ran."""
    return may_differ(ruling) and ruling & 0xFF in GRADED


def is_unavailable(ruling: int) -> bool:
    """Return whether a ruling says that a file could not be obtained."""
    return may_differ(ruling) and ruling & 0xFF == Reason.FILE_UNAVAILABLE


def kind_of(ruling: int) -> int:
    """Return a number that rulings share whose votes are counted together: they have the same
    consequences, or all say that the work was not seen (0).
    """
    if not ruling or is_unavailable(ruling):
        return 0
    return ruling >> 8 << 1 | is_exact(ruling)


def spares_signers(recorded: int, ruling: int, votes: Iterable[int]) -> bool:
    """Return whether no signer is fined for a record that votes replaced by a ruling: honest judges
    may rule otherwise than the record, or than most of the votes for what replaced it.
    """
    for_it = [vote for vote in votes if kind_of(vote) == kind_of(ruling)]
    return may_differ(recorded) or 2 * sum(map(may_differ, for_it)) > len(for_it)


def prevailing(votes: Iterable[int]) -> int | None:
    """Return the ruling whose kind has most votes, as DisputeCourt counts them in the order in
    which they are revealed; None without a vote, or if several kinds have as many.

    Its reason is that of the vote by which its kind took the lead.
    """
    tally: Counter[int] = Counter()
    leading, most, is_tied = 0, 0, False
    for ruling in votes:
        kind = kind_of(ruling)
        tally[kind] += 1
        if tally[kind] > most:
            if kind != kind_of(leading) or not most:
                leading = ruling
            most, is_tied = tally[kind], False
        elif tally[kind] == most:
            is_tied = True
    return None if is_tied or not most else leading


@dataclass(frozen=True, slots=True)
class BenchPlace:
    """A place on the bench, with its present or last juror."""

    juror: Address
    joined_at: int
    """Unix seconds; can be drawn in cases that open later than this."""
    left_at: int = 0
    """Unix seconds; can be drawn in cases that opened no later than this. 0 while it stays."""

    def is_eligible(self, opened_at: int) -> bool:
        """Return whether a case that opened at a time may draw it."""
        return self.joined_at < opened_at and not 0 < self.left_at < opened_at


def jury_seed(block_hash: Hash32, case_id: Hash32) -> Hash32:
    """Return the seed of a case's draw, from the hash of its draw block and its name."""
    return keccak(abi_words(block_hash, case_id))


def draw_jury(
    places: Sequence[BenchPlace],
    *,
    opened_at: int,
    size: int,
    seed: Hash32,
    excluded: Collection[Address] = (),
) -> list[Address]:
    """Return up to `size` different jurors among the places that existed at the opening.

    Tries place `keccak256(abi.encode(seed, i)) % places` for i = 0, 1, …, 511, and skips jurors
    that were absent, are excluded or are already drawn.
    """
    drawn: list[Address] = []
    for i in range(MAX_TRIES if places else 0):
        if len(drawn) == size:
            break
        place = places[int.from_bytes(keccak(abi_words(seed, i)), "big") % len(places)]
        if not place.is_eligible(opened_at) or place.juror in drawn or place.juror in excluded:
            continue
        drawn.append(place.juror)
    return drawn


def summons_of(batch_id: int) -> Hash32:
    """Return the name of the case about a batch that its run left unjudged."""
    head = abi_words(64, batch_id, len(_SUMMONS))
    return keccak(head + _SUMMONS.ljust(32, b"\0"))


def claim_announcement(claimant: Address, leaf: Hash32, ruling: Ruling, salt: Hash32) -> Hash32:
    """Return the hash that a claimant announces before it reveals its claim."""
    return keccak(abi_words(address_bytes(claimant), leaf, ruling.number, salt))


def vote_commitment(
    case_id: Hash32, juror: Address, ruling: Ruling | None, result_hash: Hash32, salt: Hash32
) -> Hash32:
    """Return the hash that a juror commits to before it reveals its vote; no ruling if it saw no
    data.

    The hash covers the juror, so that another juror's commitment cannot be copied.
    """
    number = 0 if ruling is None else ruling.number
    return keccak(abi_words(case_id, address_bytes(juror), number, result_hash, salt))
