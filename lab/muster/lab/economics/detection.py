"""Detection rates of cheating by attack, measured by the red team, with their source.

Reads the file of `make bench-redteam`. Only counts are used: intervals are computed here.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.protocol.economics import Cheat
from muster.protocol.errors import ConfigError
from muster.protocol.intervals import wilson

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "redteam.json"
"""Figures measured in this checkout."""
CHECKED_BY = {"check 3": ("A3", "A12"), "check 4": ("A16",), "check 5": ("A18", "A19")}
"""The attacks that measure each exact check."""


@dataclass(frozen=True, slots=True)
class Detected:
    """How often one attack was detected."""

    attack: str
    """Its id."""
    title: str
    """Title in words."""
    trials: int
    """How often it was tried."""
    caught: int
    """How often it was noticed."""
    is_of_files: bool
    """Whether a trial is one cheated submission."""

    @property
    def power(self) -> float:
        """The lower end of the 95 % interval (Wilson), which is low for few trials."""
        return wilson(self.caught, self.trials)[0]


@dataclass(frozen=True, slots=True)
class Detection:
    """Measured or given detection rates, and their source."""

    source: str
    """Text with the file, its date and its commit, or why there is none."""
    attacks: tuple[Detected, ...] = ()
    """The attacks that were tried."""
    given: float | None = None
    """Power given by the user instead of measurements."""

    def power_of(self, attacks: Sequence[str]) -> float | None:
        """Return the lowest power of some attacks; None when one of them was not tried."""
        if self.given is not None:
            return self.given
        powers = [each.power for each in self.attacks if each.attack in attacks]
        return min(powers) if len(powers) == len(attacks) else None

    def applied(self, cheats: Sequence[Cheat]) -> list[Cheat]:
        """Return the cheats with the measured power of the exact checks, where there is one."""
        return [self._applied(cheat) if cheat.exact else cheat for cheat in cheats]

    def _applied(self, cheat: Cheat) -> Cheat:
        for check, attacks in CHECKED_BY.items():
            if check in cheat.name and (power := self.power_of(attacks)) is not None:
                return replace(cheat, power=power)
        return cheat

    def files(self) -> list[Detected]:
        """Return the attacks on whole submissions, the least noticed first."""
        found = [each for each in self.attacks if each.is_of_files]
        return sorted(found, key=lambda each: (each.power, each.attack))


def detection_of(path: Path | None, given: float | None) -> Detection:
    """Return the detection rates of a file, by default this checkout's, or of a given power.

    Raises ConfigError for a named file that cannot be read or is malformed.
    """
    if given is not None:
        return Detection(f"{given:.1%} for every exact check: --detection", given=given)
    if path is None and not RESULTS.exists():
        return Detection(
            "not measured: every exact check is assumed to find every cheat. For measured figures, "
            "give the file of make bench-redteam with --redteam"
        )
    return _read(RESULTS if path is None else path)


def _read(path: Path) -> Detection:
    try:
        document = json.loads(path.read_bytes())
        attacks = tuple(
            Detected(
                attack=str(row["attack"]),
                title=str(row["title"]),
                trials=int(row["trials"]),
                caught=int(row["caught"]),
                is_of_files=row["unit"] == "submission" and row["kind"] != "economic",
            )
            for row in document["detail"]
        )
        if not all(0 <= each.caught <= each.trials > 0 for each in attacks):
            raise ValueError("an attack was caught more often than tried, or never tried")
        commit = f"commit {document['commit']}" if "commit" in document else commit_of(path)
        source = f"{path}, {document['date']}, {commit}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not hold the red team's figures: {error}",
            hint="give the redteam.json that make bench-redteam wrote",
        ) from error
    return Detection(source, attacks)


def commit_of(path: Path) -> str:
    """Return in words the commit that last changed a file, for files that name no commit."""
    asked = ["git", "-C", str(path.resolve().parent), "log", "-1", "--format=%h", "--", path.name]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "commit unknown"
    return f"commit {done.stdout.strip()}" if done.stdout.strip() else "commit unknown"
