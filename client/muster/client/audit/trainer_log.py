"""What a trainer says became of the records that it consumed: its `metrics.jsonl`.

The chain says which step consumed a record. Only the trainer knows what the filters left of it.
Where the chain says the same thing, the two are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RecordUse:
    """What became of one record."""

    version: int
    """The version whose step consumed it."""
    kept: int
    """Samples that the filters left in."""
    dropped: Mapping[str, int]
    """Samples that they left out, by reason."""
    undone_by: int | None = None
    """A later version, or its own, that went back to weights from before; None when none did."""

    @property
    def state(self) -> str:
        """Return trained, dropped (nothing was left) or undone."""
        if not self.kept:
            return "dropped"
        return "trained" if self.undone_by is None else "undone"

    def words(self) -> str:
        """Return it for people."""
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        said = f"{self.kept} of {self.kept + sum(self.dropped.values())} samples in version "
        said += f"{self.version}" + (f"; left out: {left_out}" if left_out else "")
        undone = f"; undone: version {self.undone_by} went back to earlier weights"
        return said + (undone if self.undone_by is not None else "")


@dataclass(frozen=True, slots=True)
class TrainerLog:
    """What a trainer's log says."""

    uses: Mapping[int, RecordUse]
    """By position in the training stream."""
    late: Mapping[int, Mapping[str, int]]
    """By version: samples that its step left out after the filters, of whichever file."""

    def until(self, version: int) -> TrainerLog:
        """Return the part about a version's ancestry; files that later versions undid are in it."""
        uses = {
            place: use
            if use.undone_by is None or use.undone_by <= version
            else RecordUse(use.version, use.kept, use.dropped)
            for place, use in self.uses.items()
            if use.version <= version
        }
        return TrainerLog(uses, {v: each for v, each in self.late.items() if v <= version})


def read_trainer_log(path: Path) -> TrainerLog:
    """Return what a `metrics.jsonl` says; raises ConfigError for any other file."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", hint="give a trainer's metrics.jsonl"
        ) from error
    uses: dict[int, RecordUse] = {}
    late: dict[int, dict[str, int]] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if "eval" not in entry:
                _take_in(entry, uses, late)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}:{number} is no line of a trainer's log: {error!s:.80}",
                hint="give metrics.jsonl of its state folder, of this release or a newer one",
            ) from error
    return TrainerLog(uses, late)


def _take_in(
    entry: dict[str, Any], uses: dict[int, RecordUse], late: dict[int, dict[str, int]]
) -> None:
    version, samples = int(entry["policy_version"]), int(entry["samples"])
    dropped: Counter[str] = Counter(entry["dropped"])
    taken = {int(each["position"]): each for each in entry["uses"]}
    for each in taken.values():
        dropped -= Counter(each["dropped"])
    if dropped:
        late[version] = dict(dropped)
    for place, each in taken.items():
        kept, left_out = int(each["kept"]), {str(k): int(n) for k, n in each["dropped"].items()}
        if not samples and kept:
            # The step trained on nothing, so on nothing of this file either.
            kept, left_out = 0, {**left_out, " or ".join(dropped) or "skipped": kept}
        uses[place] = RecordUse(version, kept, left_out)
    back_to = entry.get("rolled_back_to")
    if back_to is not None:
        for place, use in uses.items():
            if use.version > int(back_to) and use.undone_by is None:
                uses[place] = RecordUse(use.version, use.kept, use.dropped, version)
