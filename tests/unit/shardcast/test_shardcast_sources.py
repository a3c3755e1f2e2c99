"""Relays are chosen in proportion to success rate x bandwidth, and forgiven slowly."""

from random import Random

import pytest

from muster.protocol.errors import ConfigError
from muster.shardcast.sources import HEALING, LIE_FACTOR, MIN_SUCCESS, SMOOTHING, SourceBook

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def book(*urls: str) -> SourceBook:
    return SourceBook(urls or (A, B), rng=Random(1))


def share(sources: SourceBook, url: str, draws: int = 20_000) -> float:
    return sum(sources.choose(sources.urls) == url for _ in range(draws)) / draws


def test_fresh_relays_are_chosen_evenly() -> None:
    assert share(book(), A) == pytest.approx(0.5, abs=0.02)


def test_choice_is_in_proportion_to_bandwidth() -> None:
    sources = book()
    sources.succeeded(A, 3000, 1.0)
    sources.succeeded(B, 1000, 1.0)
    assert sources.weight(A) == 3 * sources.weight(B)
    assert share(sources, A) == pytest.approx(0.75, abs=0.02)


def test_choice_is_in_proportion_to_success() -> None:
    sources = book()
    sources.failed(A)
    expected = (1 - SMOOTHING + HEALING) / 1.0
    assert sources.weight(A) / sources.weight(B) == pytest.approx(expected)
    assert share(sources, A) == pytest.approx(expected / (1 + expected), abs=0.02)


def test_bandwidth_is_a_moving_average() -> None:
    sources = book(A)
    sources.succeeded(A, 1000, 1.0)
    sources.succeeded(A, 2000, 1.0)
    assert sources.weight(A) == pytest.approx(1000 + SMOOTHING * 1000)


def test_unmeasured_relay_counts_as_fast_as_the_average() -> None:
    sources = book(A, B, C)
    sources.succeeded(A, 1000, 1.0)
    sources.succeeded(B, 3000, 1.0)
    assert sources.weight(C) == pytest.approx(2000)


def test_lie_costs_more_than_a_failure() -> None:
    sources = book()
    sources.failed(A)
    sources.lied(B)
    assert sources.weight(B) < sources.weight(A)
    assert sources.weight(B) == pytest.approx(LIE_FACTOR + HEALING, abs=HEALING)


def test_failing_relay_keeps_a_small_chance() -> None:
    sources = book()
    for _ in range(100):
        sources.failed(A)
    assert sources.weight(A) >= MIN_SUCCESS


def test_relay_heals_while_others_work() -> None:
    sources = book()
    sources.lied(A)
    before = sources.weight(A)
    for _ in range(100):
        sources.succeeded(B, 1, 1.0)
    assert before < 0.2
    assert sources.weight(A) == pytest.approx(1.0)


def test_success_restores_the_rate_quickly() -> None:
    sources = book(A)
    for _ in range(5):
        sources.failed(A)
    for _ in range(12):
        sources.succeeded(A, 1, 1.0)
    assert sources.weight(A) == pytest.approx(1.0, abs=0.02)


def test_choice_is_among_those_asked_for() -> None:
    sources = book()
    assert {sources.choose([B]) for _ in range(50)} == {B}


def test_reserve_is_kept_apart_from_the_relays() -> None:
    sources = SourceBook([A, B], reserve=[C], rng=Random(1))
    assert (sources.relays, sources.reserve) == ([A, B], [C])
    assert sources.urls == [A, B, C]


def test_ranking_holds_every_relay_once_heavier_ones_first_more_often() -> None:
    sources = book()
    sources.succeeded(A, 9000, 1.0)
    sources.succeeded(B, 1000, 1.0)
    rankings = [sources.ranked([A, B]) for _ in range(2000)]
    assert all(sorted(ranking) == [A, B] for ranking in rankings)
    assert sum(ranking[0] == A for ranking in rankings) / 2000 == pytest.approx(0.9, abs=0.03)


def test_url_loses_its_last_slash() -> None:
    assert book("http://a:1/").urls == [A]


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http://a:x", "http://u:p@a", "http://a/?q=1"]
)
def test_book_refuses_what_is_no_server_url(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server's URL"):
        book(url)
