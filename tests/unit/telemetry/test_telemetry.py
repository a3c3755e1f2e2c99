"""Logs: one line per event, fields after the message, JSON on request."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import pytest

from muster.telemetry import setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_carries_process_message_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    logging.getLogger("x").info("submission accepted", extra={"step": 3, "slot": 0})
    line = capsys.readouterr().err.strip()
    assert line.endswith("worker info submission accepted step=3 slot=0")


def test_json_carries_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_LOG_FORMAT", "json")
    setup_logging("worker")
    logging.getLogger("x").info("submission accepted", extra={"step": 3})
    entry = json.loads(capsys.readouterr().err)
    assert (entry["process"], entry["message"], entry["step"]) == (
        "worker",
        "submission accepted",
        3,
    )


class Colour(IntEnum):
    """An integer code, like verdicts and reasons."""

    DARK_RED = 3


class Drop(StrEnum):
    """A text code, like the reasons to leave out a sample."""

    STALE = "stale"


@dataclass(frozen=True)
class Found:
    """A value of several parts."""

    colour: Colour
    drops: Counter[Drop]


FOUND = Found(Colour.DARK_RED, Counter({Drop.STALE: 2}))


def test_fields_are_names_not_reprs(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer")
    extra = {"why": Colour.DARK_RED, "dropped": FOUND.drops, "found": FOUND, "none": {}}
    logging.getLogger("x").info("left out", extra=extra)
    line = capsys.readouterr().err.strip()
    assert "why=dark_red dropped=stale:2" in line
    assert "colour:dark_red" in line
    assert line.endswith("none=-")
    assert not re.search(r"[<>(]", line)


def test_json_fields_are_names_not_reprs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_LOG_FORMAT", "json")
    setup_logging("trainer")
    logging.getLogger("x").info("left out", extra={"why": [Colour.DARK_RED], "found": FOUND})
    entry = json.loads(capsys.readouterr().err)
    assert entry["why"] == ["dark_red"]
    assert entry["found"] == {"colour": "dark_red", "drops": {"stale": 2}}


def test_a_level_below_the_chosen_one_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_LOG_LEVEL", "warning")
    setup_logging("worker")
    logging.getLogger("x").info("quiet")
    assert capsys.readouterr().err == ""


def test_a_strangers_words_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    hostile = "no\n12:00:00 worker info submission accepted\x1b[2J\r\u2028"
    logging.getLogger("x").warning("refused", extra={"error": hostile})
    out = capsys.readouterr().err
    assert out.count("\n") == 1
    assert not any(c in out for c in "\x1b\r\u2028")
