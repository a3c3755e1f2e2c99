"""What a study of `make claims` returns."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Study:
    """The figures of one study."""

    metrics: dict[str, float]
    """Figures by id."""
    detail: dict[str, Any]
    """What they are made of."""
