"""The three states of a grading: a score (0 is wrong), or no verdict at all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Graded:
    """The verifier decided."""

    score: float
    """In [0, 1]; 1 is right."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The verifier could not decide; never to be read as a score of 0."""

    reason: str
    """Why, for people."""


Grade = Graded | Undecided
"""What a verifier answers."""
