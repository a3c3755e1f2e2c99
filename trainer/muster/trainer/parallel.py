"""The processes of one trainer, under torchrun; a trainer of one process has no group at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Ranks(Protocol):
    """The processes that train one policy together, as one of them sees it."""

    @property
    def rank(self) -> int:
        """This process's number; 0 leads."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def storage_group(self) -> Any:
        """What checkpoints are agreed on in, apart from training's own messages."""

    def wait_for_all(self) -> None:
        """Return when every rank is here."""

    def wrote(self, name: str) -> bool:
        """Tell whether this rank wrote a checkpoint's file of this name."""

    def gather_digests(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return what all ranks gave, on rank 0."""


@dataclass(frozen=True, slots=True)
class OneProcess:
    """A trainer that is one process: nothing to agree on."""

    rank: int = 0
    size: int = 1
    storage_group: Any = None

    def wait_for_all(self) -> None:
        """Return."""

    def wrote(self, name: str) -> bool:
        """Return True."""
        return bool(name)

    def gather_digests(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return `own`."""
        return dict(own)


ONE_PROCESS = OneProcess()
"""The trainer without torchrun."""
