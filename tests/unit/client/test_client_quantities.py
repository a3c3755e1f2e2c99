"""Amounts, times and sizes: what people read."""

from __future__ import annotations

import pytest

from muster.client.printing import plain_table, print_facts
from muster.client.quantities import (
    format_coins,
    format_duration,
    format_share,
    format_size,
    format_time,
    format_tokens,
)


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
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (3 << 39, "1.5 TiB")]
)
def test_sizes_are_binary(size: int, text: str) -> None:
    assert format_size(size) == text


def test_other_quantities_are_short_and_exact() -> None:
    assert format_time(0) == "1970-01-01 00:00:00 UTC"
    assert format_share(12_500) == "1.25 %"
    assert format_tokens(-(10**17)) == "-0.1"
    assert format_coins(123_456_789 * 10**9) == "0.123457"


def test_a_table_keeps_its_columns_when_it_is_piped() -> None:
    assert plain_table(("a", "bb"), [("long", "x")]) == ["a     bb", "long  x"]


def test_facts_leave_out_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts({"one": 1, "none": None, "many": ["a", "b"]})
    assert capsys.readouterr().out == "one   1\nmany  a\n      b\n"
