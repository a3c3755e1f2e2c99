"""`muster doctor`: checks whether this machine is fit for a run, before anything is at stake.

It prints one line per question, with a figure and advice.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from muster.protocol.errors import MusterError


class State(StrEnum):
    """State of an answer."""

    OK = "ok"
    """As it should be."""
    WARN = "warn"
    """It works, but not as well as it could."""
    FAIL = "fail"
    """Work would not be possible, or not be accepted."""
    SKIP = "skip"
    """Not examined: an earlier question failed, or an option is missing."""


@dataclass(frozen=True, slots=True)
class Line:
    """One question and its answer."""

    section: str
    """Section of the examination."""
    name: str
    """Name of the question."""
    state: State
    """State of the answer."""
    figure: str
    """The answer, with its unit."""
    advice: str = ""
    """Advice, if the state is not OK."""


def failed(section: str, name: str, error: Exception) -> Line:
    """Return the line of a question that ended in an error."""
    hint = error.hint if isinstance(error, MusterError) and error.hint else "look into it"
    return Line(section, name, State.FAIL, str(error) or type(error).__name__, hint)


def skipped(section: str, name: str, why: str) -> Line:
    """Return the line of a question that was not asked."""
    return Line(section, name, State.SKIP, why)


def is_fit(lines: Sequence[Line]) -> bool:
    """Return whether nothing failed."""
    return all(line.state is not State.FAIL for line in lines)


def to_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the examination as JSON values."""
    return {
        "fit": is_fit(lines),
        "why": [line.figure for line in lines if line.state is State.FAIL],
        "lines": [asdict(line) for line in lines],
    }
