"""The three states of a grading: a score (0 is wrong), or no score at all."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Graded:
    """The verifier decided."""

    score: float
    """In [0, 1]; 1 is right."""
    detail: str = field(default="", compare=False)
    """Why, for people; two machines may word it differently."""
    is_repeatable: bool = field(default=True, compare=False)
    """Whether every honest machine comes to this score. It does not when a limit of time or memory
    decided, or nearly did: then a claim that differs is no proof of fraud."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The verifier could not decide; never to be read as a score of 0."""

    reason: str
    """Why, for people."""


Grade = Graded | Undecided
"""What a verifier answers."""
