"""Token buckets: burst, refill, and a bounded memory of addresses."""

from hypothesis import given
from hypothesis import strategies as st

from muster.shardcast.limits import MAX_TRACKED_ADDRESSES, RequestRates


def test_address_may_burst_and_is_then_refused() -> None:
    rates = RequestRates(1.0, burst=3)
    assert [rates.admit("a", 0.0) for _ in range(4)] == [True, True, True, False]


def test_tokens_come_back_at_the_rate() -> None:
    rates = RequestRates(2.0, burst=1)
    assert rates.admit("a", 0.0)
    assert not rates.admit("a", 0.4)
    assert rates.admit("a", 0.9)


def test_one_address_does_not_take_from_another() -> None:
    rates = RequestRates(1.0, burst=1)
    assert rates.admit("a", 0.0)
    assert rates.admit("b", 0.0)


def test_quiet_time_earns_no_more_than_the_burst() -> None:
    rates = RequestRates(10.0, burst=2)
    rates.admit("a", 0.0)
    assert [rates.admit("a", 1e6) for _ in range(3)] == [True, True, False]


def test_longest_idle_address_is_forgotten_when_there_are_too_many() -> None:
    rates = RequestRates(0.001, burst=1)
    rates.admit("first", 0.0)
    for number in range(MAX_TRACKED_ADDRESSES):
        rates.admit(str(number), 0.0)
    assert rates.admit("first", 0.0)


@given(st.lists(st.floats(0, 10), max_size=60))
def test_never_more_than_burst_and_rate_allow(gaps: list[float]) -> None:
    rates, now_s, admitted = RequestRates(3.0, burst=5), 0.0, 0
    for gap in gaps:
        now_s += gap
        admitted += rates.admit("a", now_s)
    assert admitted <= 5 + 3.0 * now_s + 1e-6
