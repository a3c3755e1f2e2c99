"""A hostile second run on the same contracts: each of its attacks is played and fails."""

import pytest

from muster.lab.redteam import byruns
from muster.lab.redteam.report import PAGE


def test_every_attack_by_a_hostile_run_fails() -> None:
    assert byruns.failures(byruns.play()) == []


@pytest.mark.parametrize(
    ("results", "broken"),
    [({"test_R3_direct_work": (False, 1)}, "R3: submits"), ({}, "R3: submits")],
    ids=["one succeeds", "none is played"],
)
def test_an_attack_that_succeeds_or_is_not_played_is_named(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, tuple[bool, int]], broken: str
) -> None:
    others = {f"{play.tests}holds": (True, 1) for play in byruns.PLAYS if play.number != 3}
    monkeypatch.setattr(byruns, "results_of", lambda _tests: others | results)
    (failure,) = byruns.failures(byruns.play())
    assert failure.startswith(broken)


def test_page_tells_each_of_them() -> None:
    assert byruns.table() in PAGE.read_text()
