"""The problems that a policy version sets aside, and the rules for a valid list.

The trainer lists problems that are solved (nearly) always or never. The list is in the version's
folder, so the manifest root on chain and in every ticket covers its bytes. The draw of a ticket's
problems skips listed ones (`muster.protocol.seeds`). Everybody who derives a ticket has the folder,
because its tokenizer encodes the prompts.

A list has one bit per problem of the task set, so it has one order and no duplicates. An invalid
list sets nothing aside, for everybody who derives: nobody has to trust its author.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

FILE_NAME = "set_aside.bits"
"""The list's file in a policy folder; without it nothing is set aside."""
MAX_BYTES = 1 << 25
"""Most bytes of a list: no task set has more problems. More bytes of a file are not read."""
LEAST_LEFT = 8
"""At least one in so many problems of a part must not be set aside."""


class ListFault(StrEnum):
    """Why a list is invalid."""

    LENGTH = "it does not have one bit for each problem of the task set"
    UNKNOWN = "it sets problems aside that the task set does not have"
    PART = "it sets problems aside of a part that skips none"
    TOO_MANY = "it leaves less than an eighth of a part, or less than a submission needs"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the task set, for checking a list."""

    problems: range
    """Its indices."""
    may_skip: bool
    """Whether its problems may be set aside."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """The problems that are set aside, by their index in the task set."""

    bits: bytes = b""
    """The list's file: problem i is bit `i mod 8`, from the lowest, of byte `i div 8`. Empty for
    no list."""

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int):
            return False
        place, bit = divmod(index, 8)
        return place < len(self.bits) and bool(self.bits[place] >> bit & 1)

    def __len__(self) -> int:
        return self._number.bit_count()

    def fault(self, size: int, stretches: Sequence[Stretch], needed: int) -> ListFault | None:
        """Return why this list is invalid for a task set of `size` problems; None if it is valid.

        `stretches` are its parts, which cover it; each must leave the `needed` problems of a
        submission.
        """
        if not self.bits:
            return None
        if len(self.bits) != -(-size // 8):
            return ListFault.LENGTH
        number = self._number
        if number >> size:
            return ListFault.UNKNOWN
        for each in stretches:
            of_part = (1 << len(each.problems)) - 1
            listed = (number >> each.problems.start & of_part).bit_count()
            if listed and not each.may_skip:
                return ListFault.PART
            if listed > most_listed(len(each.problems), needed):
                return ListFault.TOO_MANY
        return None

    @property
    def _number(self) -> int:
        return int.from_bytes(self.bits, "little")

    @classmethod
    def of(cls, indices: Iterable[int], size: int) -> Self:
        """Return the list of some problems of a task set of `size`; without any, an empty list."""
        bits = bytearray(-(-size // 8))
        for index in indices:
            bits[index // 8] |= 1 << index % 8
        return cls(bytes(bits) if any(bits) else b"")


NOTHING = SetAside()
"""No list: nothing is set aside."""


def most_listed(size: int, needed: int) -> int:
    """Return how many of a part's `size` problems may be set aside if a submission needs `needed`
    distinct ones.
    """
    return max(0, size - max(needed, -(-size // LEAST_LEFT)))
