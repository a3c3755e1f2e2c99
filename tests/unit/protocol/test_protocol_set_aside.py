"""Lists of problems that are set aside: valid ones, refused ones, and draws past them."""

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from muster.protocol.encoding import keccak
from muster.protocol.ids import Hash32
from muster.protocol.seeds import Purpose, draw, mixed_indices, problem_indices, revisits
from muster.protocol.set_aside import ListFault, SetAside, Stretch, most_listed

SEED = keccak(b"ticket")
SIZE, NEEDED = 100, 4
WHOLE = [Stretch(range(SIZE), may_skip=True)]
PARTS = [Stretch(range(60), may_skip=True), Stretch(range(60, SIZE), may_skip=False)]
seeds = st.binary(min_size=32, max_size=32).map(Hash32)
listed = st.sets(st.integers(0, SIZE - 1), max_size=most_listed(SIZE, NEEDED))


@given(st.sets(st.integers(0, SIZE - 1)))
def test_a_list_has_what_was_put_in(indices: set[int]) -> None:
    made = SetAside.of(indices, SIZE)
    assert {i for i in range(SIZE + 20) if i in made} == indices
    assert len(made) == len(indices)
    assert len(made.bits) == (13 if indices else 0)


def test_a_list_has_its_bytes() -> None:
    assert SetAside.of([0, 9, 10], 20).bits == bytes([0b1, 0b110, 0])
    assert SetAside.of([], 20) == SetAside()
    assert "0" not in SetAside.of([0], 20)


@given(listed)
def test_a_list_that_leaves_enough_holds(indices: set[int]) -> None:
    assert SetAside.of(indices, SIZE).fault(SIZE, WHOLE, NEEDED) is None


@pytest.mark.parametrize(
    ("make", "stretches", "fault"),
    [
        (lambda: SetAside(bytes(12)), WHOLE, ListFault.LENGTH),
        (lambda: SetAside(bytes(14)), WHOLE, ListFault.LENGTH),
        (lambda: SetAside.of([100], 104), WHOLE, ListFault.UNKNOWN),
        (lambda: SetAside.of([103, 5], 104), WHOLE, ListFault.UNKNOWN),
        (lambda: SetAside.of([60], SIZE), PARTS, ListFault.PART),
        (lambda: SetAside.of(range(SIZE), SIZE), WHOLE, ListFault.TOO_MANY),
        (lambda: SetAside.of(range(88), SIZE), WHOLE, ListFault.TOO_MANY),
        (lambda: SetAside.of(range(53), SIZE), PARTS, ListFault.TOO_MANY),
    ],
)
def test_a_list_that_does_not_hold_is_named(
    make: Callable[[], SetAside], stretches: list[Stretch], fault: ListFault
) -> None:
    assert make().fault(SIZE, stretches, NEEDED) is fault


@pytest.mark.parametrize(
    ("size", "needed", "most"),
    [
        (100, 4, 87),
        (96, 4, 84),
        (97, 4, 84),
        (16, 4, 12),
        (16, 16, 0),
        (4, 16, 0),
        (10**6, 16, 875000),
    ],
)
def test_an_eighth_and_a_submission_s_problems_stay(size: int, needed: int, most: int) -> None:
    assert most_listed(size, needed) == most
    fullest = SetAside.of(range(most), size)
    assert fullest.fault(size, [Stretch(range(size), may_skip=True)], needed) is None
    one_more = SetAside.of(range(most + 1), size)
    if most < size:
        assert one_more.fault(size, [Stretch(range(size), may_skip=True)], needed) is not None


# Drawing past a list


def past(seed: Hash32, count: int, aside: set[int], every: int) -> list[int]:
    """The rule written a second way: all draws, then the removal of listed problems."""
    free = [j for j in range(count) if draw(seed, Purpose.REVISIT, j) % every == 0]
    chosen: list[int] = []
    for counter in range(100_000):
        index = draw(seed, Purpose.PROBLEM, counter) % SIZE
        if len(chosen) == count:
            return chosen
        if index not in chosen and (index not in aside or len(chosen) in free):
            chosen.append(index)
    raise AssertionError


@given(seeds, listed, st.integers(2, 9))
def test_a_list_is_drawn_past(seed: Hash32, indices: set[int], every: int) -> None:
    drawn = mixed_indices(
        seed, [range(SIZE)] * NEEDED, SetAside.of(indices, SIZE), [every] * NEEDED
    )
    assert drawn == past(seed, NEEDED, indices, every)


@given(seeds, st.integers(2, 9))
def test_without_a_list_nothing_changes(seed: Hash32, every: int) -> None:
    ranges = [range(SIZE)] * NEEDED
    plain = problem_indices(seed, NEEDED, SIZE)
    assert mixed_indices(seed, ranges, SetAside(), [every] * NEEDED) == plain


@given(seeds, listed)
def test_a_part_that_skips_none_is_drawn_as_without_a_list(seed: Hash32, indices: set[int]) -> None:
    aside, ranges = SetAside.of(indices, SIZE), [range(SIZE)] * NEEDED
    plain = problem_indices(seed, NEEDED, SIZE)
    assert mixed_indices(seed, ranges, aside, [0] * NEEDED) == plain
    assert mixed_indices(seed, ranges, aside) == plain


def test_one_draw_in_so_many_comes_back() -> None:
    found = [revisits(keccak(b"%d" % n), n % 16, 8) for n in range(8_000)]
    assert 900 < sum(found) < 1_100
    assert revisits(SEED, 0, 0)
