"""Trap plans: one secret decides every slot, one hash binds it, anything else is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import RunId, Step, to_address
from muster.protocol.traps import KINDS, Trap, TrapKind, TrapPlan

WORKER = to_address(keccak(b"trap worker")[:20])
PLAN = TrapPlan(RunId(3), WORKER, Step(2), Step(400), 50_000, keccak(b"secret"))


def test_share_of_traps_is_the_rate() -> None:
    laid = [PLAN.trap_at(step, index) for step in range(2, 401) for index in range(20)]
    share = sum(trap is not None for trap in laid) / len(laid)
    assert share == pytest.approx(0.05, abs=0.008)  # three standard deviations of 7,980 draws
    assert {trap.kind for trap in laid if trap} == set(KINDS)


@pytest.mark.parametrize(("rate_ppm", "expected"), [(0, 0), (1_000_000, 399)])
def test_rates_of_none_and_all(rate_ppm: int, expected: int) -> None:
    plan = replace(PLAN, rate_ppm=rate_ppm)
    assert sum(plan.trap_at(step, 0) is not None for step in range(500)) == expected


def test_draws_are_pinned() -> None:
    """A plan on chain outlives the software that made it."""
    assert replace(PLAN, rate_ppm=1_000_000).trap_at(2, 0) == Trap(
        TrapKind.OTHER_PROOF, 16_830_168_079_708_813_696
    )


def test_a_slot_is_what_it_is_however_often_one_asks() -> None:
    other = replace(PLAN, secret=keccak(b"another"))
    mine = [PLAN.trap_at(step, 1) for step in range(2, 400)]
    assert mine == [PLAN.trap_at(step, 1) for step in range(2, 400)]
    assert mine != [other.trap_at(step, 1) for step in range(2, 400)]


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": RunId(4)},
        {"worker": to_address(keccak(b"other")[:20])},
        {"first_step": Step(1)},
        {"last_step": Step(401)},
        {"rate_ppm": 50_001},
        {"secret": keccak(b"other secret")},
    ],
)
def test_commitment_binds_every_part(change: dict[str, Any]) -> None:
    assert replace(PLAN, **change).commitment() != PLAN.commitment()


def test_plan_comes_back_from_its_file_and_its_name_tells_no_secret() -> None:
    assert TrapPlan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert PLAN.secret.hex() not in repr(PLAN)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(EncodingError):
        TrapPlan.from_json(value)


@pytest.mark.parametrize(
    "change",
    [
        {"rate_ppm": 1_000_001},
        {"run": -1},
        {"run": 1 << 32},
        {"run": True},
        {"worker": "0x12"},
        {"secret": "0x"},
    ],
)
def test_parts_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EncodingError, match="not a trap plan"):
        TrapPlan.from_json(PLAN.to_json() | change)


def test_every_kind_is_tried_once_from_the_drawn_one_on() -> None:
    for step in range(2, 60):
        trap = replace(PLAN, rate_ppm=1_000_000).trap_at(step, 0)
        assert trap is not None
        assert trap.kinds()[0] is trap.kind
        assert set(trap.kinds()) == set(KINDS)


@pytest.mark.parametrize(
    "change",
    [{"first_step": 0, "rate_ppm": 0}, {"last_step": (1 << 32) - 1, "rate_ppm": 1_000_000}],
)
def test_parts_at_the_ends_of_their_range_are_read(change: dict[str, int]) -> None:
    value = PLAN.to_json() | change
    assert TrapPlan.from_json(value).to_json() == value
