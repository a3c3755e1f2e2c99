"""Derivation of seeds and problems: no choice, and no bias."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, RunId, Step, to_address
from muster.protocol.seeds import (
    Purpose,
    draw,
    problem_indices,
    sample_seed,
    target_length,
    ticket_seed,
)

WORKER = to_address("0x" + "33" * 20)
BEACON = keccak(b"beacon")
SEED = ticket_seed(RunId(1), BEACON, WORKER, Step(2), 3)
seeds = st.binary(min_size=32, max_size=32).map(Hash32)


def test_ticket_seed_is_the_hash_of_five_words() -> None:
    words = abi_words(1, BEACON, address_bytes(WORKER), 2, 3)
    assert len(words) == 160
    assert keccak(words) == SEED


@pytest.mark.parametrize(
    "other",
    [
        ticket_seed(RunId(2), BEACON, WORKER, Step(2), 3),
        ticket_seed(RunId(1), keccak(b"x"), WORKER, Step(2), 3),
        ticket_seed(RunId(1), BEACON, to_address("0x" + "34" * 20), Step(2), 3),
        ticket_seed(RunId(1), BEACON, WORKER, Step(3), 3),
        ticket_seed(RunId(1), BEACON, WORKER, Step(2), 4),
        ticket_seed(RunId(1), BEACON, WORKER, Step(3), 2),
    ],
)
def test_ticket_seed_depends_on_every_part(other: Hash32) -> None:
    assert other != SEED


@given(seeds, st.integers(1, 300), st.data())
def test_problems_are_distinct_and_in_range(seed: Hash32, size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, min(size, 40)))
    chosen = problem_indices(seed, count, size)
    assert len(set(chosen)) == count == len(chosen)
    assert all(0 <= i < size for i in chosen)


@given(seeds, st.integers(1, 30))
def test_fewer_problems_are_a_prefix_of_more(seed: Hash32, count: int) -> None:
    assert problem_indices(seed, 30, 100)[:count] == problem_indices(seed, count, 100)


def test_problems_are_refused_when_the_set_is_too_small() -> None:
    with pytest.raises(EncodingError, match="cannot draw 5 problems from a set of 4"):
        problem_indices(SEED, 5, 4)


def test_problems_are_uniform() -> None:
    counts = Counter(
        i for n in range(600) for i in problem_indices(keccak(bytes([n % 256, n // 256])), 5, 10)
    )
    # 3,000 draws over 10 cells without replacement: chi-square with 9 degrees, 0.1 % point 27.9.
    assert sum((counts[i] - 300) ** 2 / 300 for i in range(10)) < 27.9


def test_sample_seeds_of_a_ticket_differ() -> None:
    all_seeds = {sample_seed(SEED, j, i, 16) for j in range(8) for i in range(16)}
    assert len(all_seeds) == 128


def test_sample_seed_is_the_documented_draw() -> None:
    assert sample_seed(SEED, 2, 5, 16) == draw(SEED, Purpose.SAMPLE, 37)


def test_target_length_is_minus_one_without_budgets() -> None:
    assert target_length(SEED, 0, ()) == -1


@given(seeds, st.integers(0, 100))
def test_target_length_is_one_of_the_budgets(seed: Hash32, problem: int) -> None:
    assert target_length(seed, problem, (1000, 2000, 3000)) in (1000, 2000, 3000)
