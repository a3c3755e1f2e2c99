"""Amounts, times and sizes in the form for people."""

import sys

import pytest
from hypothesis import given, strategies as st

from muster.client import quantities
from muster.client.cli.printing import plain_table, print_facts, print_table, printable


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.25, "1.2 s"),
        (9, "9 s"),
        (59.6, "1 min"),
        (90, "1 min 30 s"),
        (3600, "1 h"),
        (3605, "1 h"),
        (7500, "2 h 5 min"),
        (86400 * 3 + 3600 * 4 + 59, "3 d 4 h"),
    ],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert quantities.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (3 << 39, "1.5 TiB")]
)
def test_sizes_are_binary(size: int, text: str) -> None:
    assert quantities.format_size(size) == text


def test_other_quantities_are_short_and_exact() -> None:
    assert quantities.format_time(0) == "1970-01-01 00:00:00 UTC"
    assert quantities.format_share(12_500) == "1.25 %"
    assert quantities.format_tokens(-(10**17)) == "-0.1"
    assert quantities.format_coins(123_456_789 * 10**9) == "0.123457"


def test_a_table_keeps_its_columns_when_it_is_piped() -> None:
    assert plain_table(("a", "bb"), [("long", "x")]) == ["a     bb", "long  x"]
    assert plain_table(("a", "bb"), [("a", "x\nok")]) == ["a  bb", "a  x ok"]


def test_facts_leave_out_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"one": 1, "none": None, "many": ["a", "b\npaid  yes"]})
    assert capsys.readouterr().out == "one   1\nmany  a\n      b\n      paid  yes\n"


def test_a_table_on_a_terminal_shows_every_cell_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_table(["name", "value"], [("[bold]x[/bold]", "\x1b[31m7")])
    shown = capsys.readouterr().out
    assert "[bold]x[/bold]" in shown
    assert "\x1b[31m7" not in shown


@given(st.text())
def test_strangers_words_do_not_drive_the_terminal(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert all(c.isprintable() or c in "\n\ufffd" for c in shown)
    assert printable(shown) == shown
