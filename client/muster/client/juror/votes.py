"""What a juror has decided: one vote per case, on disk before its commitment leaves.

A vote is drawn up once and never changed: another decision on the same case would leave a
commitment that nobody can reveal, which costs stake. How far a vote has come is on chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.client.journal import Journal
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address, Hash32, to_address, to_hash32
from muster.protocol.jury import Ruling, vote_commitment


@dataclass(frozen=True, slots=True)
class Vote:
    """A juror's decision on a case, with what hides it until it is revealed."""

    case_id: Hash32
    """The case."""
    number: int
    """Its number: a reorganised chain may have another case of that name."""
    juror: Address
    """Who votes."""
    ruling: int
    """What it found, as a number; 0 when nobody showed it the work."""
    result_hash: Hash32
    """Keccak-256 of the document about what was recomputed."""
    salt: Hash32
    """Keeps others from finding the vote by trying."""

    def __repr__(self) -> str:
        return f"Vote(0x{self.case_id.hex()}, juror={self.juror})"

    def commitment(self) -> Hash32:
        """Return what goes on chain before the vote does."""
        ruling = Ruling.of(self.ruling)
        return vote_commitment(self.case_id, self.juror, ruling, self.result_hash, self.salt)


class VoteJournal(Journal):
    """Remembers every vote before its commitment leaves."""

    def __init__(self, folder: Path) -> None:
        self._votes: dict[tuple[Hash32, Address, int], Vote] = {}
        super().__init__(folder / "votes.jsonl")

    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember a vote."""
        vote = Vote(
            case_id=to_hash32(entry["case"]),
            number=int(entry["number"]),
            juror=to_address(entry["juror"]),
            ruling=int(entry["ruling"]),
            result_hash=to_hash32(entry["result_hash"]),
            salt=to_hash32(entry["salt"]),
        )
        self._votes[vote.case_id, vote.juror, vote.number] = vote

    def record(self, vote: Vote) -> Vote:
        """Return what may be voted: this, now durable, or what was recorded before."""
        if earlier := self.find(vote.case_id, vote.juror, vote.number):
            return earlier
        self.append(
            {
                "case": hex0x(vote.case_id),
                "number": vote.number,
                "juror": vote.juror,
                "ruling": vote.ruling,
                "result_hash": hex0x(vote.result_hash),
                "salt": hex0x(vote.salt),
            }
        )
        self._votes[vote.case_id, vote.juror, vote.number] = vote
        return vote

    def find(self, case_id: Hash32, juror: Address, number: int) -> Vote | None:
        """Return the vote that was recorded for a case."""
        return self._votes.get((case_id, juror, number))
