"""Relays are chosen in proportion to success rate x bandwidth, and forgiven slowly."""

from random import Random

import pytest

from muster.protocol.errors import ConfigError
from muster.shardcast.transfer import HEALING, LIE_FACTOR, MIN_SUCCESS, SMOOTHING, RelayScores

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def made(*urls: str) -> RelayScores:
    return RelayScores(urls or (A, B), rng=Random(1))


def share(scores: RelayScores, url: str, draws: int = 20_000) -> float:
    return sum(scores.choose(scores.urls) == url for _ in range(draws)) / draws


def test_fresh_relays_are_chosen_evenly() -> None:
    assert share(made(), A) == pytest.approx(0.5, abs=0.02)


def test_choice_is_in_proportion_to_bandwidth() -> None:
    scores = made()
    scores.succeeded(A, 3000, 1.0)
    scores.succeeded(B, 1000, 1.0)
    assert scores.weight(A) == 3 * scores.weight(B)
    assert share(scores, A) == pytest.approx(0.75, abs=0.02)


def test_choice_is_in_proportion_to_success() -> None:
    scores = made()
    scores.failed(A)
    expected = (1 - SMOOTHING + HEALING) / 1.0
    assert scores.weight(A) / scores.weight(B) == pytest.approx(expected)
    assert share(scores, A) == pytest.approx(expected / (1 + expected), abs=0.02)


def test_bandwidth_is_a_moving_average() -> None:
    scores = made(A)
    scores.succeeded(A, 1000, 1.0)
    scores.succeeded(A, 2000, 1.0)
    assert scores.weight(A) == pytest.approx(1000 + SMOOTHING * 1000)


def test_unmeasured_relay_counts_as_fast_as_the_average() -> None:
    scores = made(A, B, C)
    scores.succeeded(A, 1000, 1.0)
    scores.succeeded(B, 3000, 1.0)
    assert scores.weight(C) == pytest.approx(2000)


def test_relay_that_was_slow_is_chosen_seldom_but_not_never() -> None:
    scores = made()
    scores.succeeded(A, 1_000_000, 1.0)
    scores.succeeded(B, 1_000_000, 1.0)
    scores.slowed(B, 100, 1.0)
    assert 0 < share(scores, B) < 0.02


def test_relay_that_brought_nothing_may_have_waited_itself() -> None:
    scores = made()
    scores.succeeded(B, 1_000_000, 1.0)
    scores.slowed(B, 0, 1.0)
    assert scores.best([A, B]) == pytest.approx(1_000_000)
    assert scores.weight(B) < 1_000_000


def test_lie_costs_more_than_a_failure() -> None:
    scores = made()
    scores.failed(A)
    scores.lied(B)
    assert scores.weight(B) < scores.weight(A)
    assert scores.weight(B) == pytest.approx(LIE_FACTOR + HEALING, abs=HEALING)


def test_failing_relay_keeps_a_small_chance() -> None:
    scores = made()
    for _ in range(100):
        scores.failed(A)
    assert scores.weight(A) >= MIN_SUCCESS


def test_relay_heals_while_others_work() -> None:
    scores = made()
    scores.lied(A)
    before = scores.weight(A)
    for _ in range(100):
        scores.succeeded(B, 1, 1.0)
    assert before < 0.2
    assert scores.weight(A) == pytest.approx(1.0)


def test_success_restores_the_rate_quickly() -> None:
    scores = made(A)
    for _ in range(5):
        scores.failed(A)
    for _ in range(12):
        scores.succeeded(A, 1, 1.0)
    assert scores.weight(A) == pytest.approx(1.0, abs=0.02)


def test_choice_is_among_those_asked_for() -> None:
    scores = made()
    assert {scores.choose([B]) for _ in range(50)} == {B}


def test_reserve_is_kept_apart_from_the_relays() -> None:
    scores = RelayScores([A, B], reserve=[C], rng=Random(1))
    assert (scores.relays, scores.reserve) == ([A, B], [C])
    assert scores.urls == [A, B, C]


def test_ranking_holds_every_relay_once_heavier_ones_first_more_often() -> None:
    scores = made()
    scores.succeeded(A, 9000, 1.0)
    scores.succeeded(B, 1000, 1.0)
    rankings = [scores.ranked([A, B]) for _ in range(2000)]
    assert all(sorted(ranking) == [A, B] for ranking in rankings)
    assert sum(ranking[0] == A for ranking in rankings) / 2000 == pytest.approx(0.9, abs=0.03)


def test_relays_that_stay_keep_their_scores_when_others_come() -> None:
    scores = RelayScores(["http://a", "http://b"], reserve=["http://o"], rng=Random(1))
    for url in ("http://a", "http://b", "http://o"):
        scores.succeeded(url, 1_000, 1.0)
    scores.use(["http://c", "http://b/", "http://o"])
    assert scores.relays == ["http://c", "http://b"]
    assert scores.urls == ["http://c", "http://b", "http://o"]
    assert [scores.is_known(url) for url in scores.urls] == [False, True, True]
    # A transfer may end at one that is asked no more.
    scores.succeeded("http://a", 1_000, 1.0)
    assert scores.relays == ["http://c", "http://b"]


def test_list_with_what_is_no_server_replaces_nothing() -> None:
    scores = made("http://a")
    with pytest.raises(ConfigError):
        scores.use(["http://b", "ftp://c"])
    assert scores.urls == ["http://a"]


def test_url_loses_its_last_slash() -> None:
    assert made("http://a:1/").urls == [A]


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http://a:x", "http://u:p@a", "http://a/?q=1"]
)
def test_scores_refuse_what_is_no_server_url(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server's URL"):
        made(url)
