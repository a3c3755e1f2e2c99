"""How samples are laid out for a forward pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.inference.batches import distinct, pad_left, pad_right, plan_decode, plan_prefill

rows = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=20)


@given(rows)
def test_decode_plan_holds_every_sample_once(prompts: list[list[int]]) -> None:
    assert sorted(plan_decode(prompts)) == list(range(len(prompts)))


def test_decode_plan_puts_equal_prompts_side_by_side() -> None:
    assert plan_decode([[2, 2], [1], [3, 3], [2, 2]]) == [1, 0, 3, 2]


@given(rows, st.integers(1, 8), st.integers(1, 60), st.integers(1, 30))
def test_prefill_plan_holds_every_sample_once(
    prompts: list[list[int]], max_rows: int, max_tokens: int, max_logit_rows: int
) -> None:
    samples = [(prompt, prompt[::-1]) for prompt in prompts]
    batches = plan_prefill(samples, max_rows, max_tokens, max_logit_rows)
    assert sorted(i for batch in batches for i in batch) == list(range(len(prompts)))
    for batch in batches:
        first = min(len(samples[i][0]) for i in batch)
        last = max(len(samples[i][0]) + len(samples[i][1]) for i in batch)
        assert len(batch) == 1 or len(batch) * (last - first) <= max_logit_rows
        assert len(batch) == 1 or len(batch) * last <= max_tokens
        assert len(batch) <= max_rows


def test_prefill_plan_of_nothing_is_empty() -> None:
    assert plan_prefill([], 8, 8, 8) == plan_decode([]) == []


def test_distinct_prompts_keep_their_order() -> None:
    prompts, rows = distinct([[1], [2, 3], [1], [4]])
    assert prompts == [(1,), (2, 3), (4,)]
    assert rows.tolist() == [0, 1, 0, 2]


def test_left_padding_ends_rows_together() -> None:
    tokens, mask = pad_left([[1, 2, 3], [4]])
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask is not None
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_left_padding_has_no_mask_when_rows_are_equally_long() -> None:
    tokens, mask = pad_left([[1, 2], [3, 4]])
    assert tokens.tolist() == [[1, 2], [3, 4]]
    assert mask is None


def test_right_padding_starts_rows_together() -> None:
    assert pad_right([[1, 2, 3], [4]]).tolist() == [[1, 2, 3], [4, 0, 0]]
