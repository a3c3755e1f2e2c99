"""A fast selection: every attack of the catalogue at least five times, against the real checks.

Attack A15, on the history of all of a worker's work, takes hundreds of submissions. `make test-all`
plays it, and tests/unit/client/validator/test_client_conduct.py has small versions of it.
"""

from typing import NamedTuple

import pytest

from muster.lab.redteam.catalogue import ATTACKS, ELSEWHERE
from muster.lab.redteam.report import PAGE
from muster.lab.redteam.runner import run
from muster.lab.redteam.stage import Stage


class Claimed(NamedTuple):
    """The page's row of an attack: trials played and caught, and whether the defence held."""

    trials: int
    caught: int
    holds: bool


def claims() -> dict[str, Claimed]:
    """Return the page's rows by attack."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().split("\n")
    ]
    return {
        row[0]: Claimed(int(row[4]), int(row[5]), row[9] == "yes")
        for row in rows
        if len(row) == 10 and row[0].startswith("A") and row[4].isdigit()
    }


CLAIMS = claims()
LONG = pytest.param("A15", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [LONG if name == "A15" else name for name in ATTACKS])
def test_defence_holds(stage: Stage, name: str) -> None:
    (result,) = run(stage, [ATTACKS[name]])
    played = sum(v.trials + v.harmless for v in result.by_variant)
    assert played >= 5
    assert result.failure == ""
    if ATTACKS[name].kind == "hard":
        assert CLAIMS[name].caught == CLAIMS[name].trials
        assert result.caught == result.trials


def test_every_number_is_played_or_explained_once() -> None:
    numbers = [*ATTACKS, *(entry.id for entry in ELSEWHERE)]
    assert sorted(numbers, key=lambda n: int(n[1:])) == [f"A{i}" for i in range(1, 41)]


def test_page_has_every_attack_and_every_defence_holds() -> None:
    assert CLAIMS.keys() == ATTACKS.keys()
    assert all(claimed.holds for claimed in CLAIMS.values())
