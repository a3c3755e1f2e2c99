"""What the engine's process does for reasoning-gym: ask a family's scorer."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import reasoning_gym


def warm_up() -> None:
    """Load what scorers need; importing the library did."""


@cache
def _scorer(family: str) -> Any:
    return reasoning_gym.get_score_answer_fn(family)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the score of an answer, or the name of what the scorer raised."""
    try:
        score = float(_scorer(request["family"])(request["answer"], request["entry"]))
    except Exception as error:  # scorers raise on answers that they do not expect
        return {"failed": type(error).__name__}
    return {"score": score} if math.isfinite(score) else {"failed": "a score that is no number"}
