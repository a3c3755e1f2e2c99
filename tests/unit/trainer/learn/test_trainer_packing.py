"""Micro-batches: every token once, within the budget, and prompts once per micro-batch."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from muster.trainer.learn.packing import (
    ASSUMED_WIDTH,
    MicroBatch,
    TrainingSample,
    balance,
    group_cost,
    pack,
)

TOKENS = st.lists(st.integers(3, 12), min_size=1, max_size=9).map(tuple)
SAMPLES = st.lists(
    st.builds(
        TrainingSample,
        prompt_tokens=st.sampled_from([(3,), (4, 5, 6), (4, 5), (7, 8, 9, 10, 11)]) | TOKENS,
        completion_tokens=TOKENS,
        advantage=st.floats(-1, 1),
        policy_version=st.integers(0, 3),
    ),
    min_size=1,
    max_size=16,
)
GROUPS = st.lists(
    st.builds(
        lambda prompt, lengths: [TrainingSample((3,) * prompt, (4,) * n, 0.0, 0) for n in lengths],
        st.integers(1, 50),
        st.lists(st.integers(1, 300), min_size=1, max_size=3),
    ),
    max_size=9,
)
BUDGETS = st.integers(1, 100)


@given(SAMPLES, BUDGETS, st.booleans())
def test_every_sample_is_packed_exactly_once(
    samples: list[TrainingSample], budget: int, is_padded: bool
) -> None:
    batches = pack(samples, budget, is_padded=is_padded)
    assert sorted(i for batch in batches for i in batch.order) == list(range(len(samples)))


@given(SAMPLES, BUDGETS, st.booleans())
def test_micro_batches_stay_within_the_budget_or_hold_one_sample(
    samples: list[TrainingSample], budget: int, is_padded: bool
) -> None:
    for batch in pack(samples, budget, is_padded=is_padded):
        assert batch.tokens_BT.numel() <= budget or len(batch.order) == 1


@given(SAMPLES, BUDGETS)
def test_packed_rows_hold_each_prompt_once_and_no_padding(
    samples: list[TrainingSample], budget: int
) -> None:
    for batch in pack(samples, budget):
        chosen = [samples[i] for i in batch.order]
        prompts = {sample.prompt_tokens for sample in chosen}
        expected = sum(map(len, prompts)) + sum(len(s.completion_tokens) - 1 for s in chosen)
        assert batch.layout is not None
        assert batch.tokens_BT.numel() == batch.layout.width == expected


@given(SAMPLES)
def test_samples_of_a_prompt_share_a_micro_batch_when_they_fit(
    samples: list[TrainingSample],
) -> None:
    budget = max(
        len(s.prompt_tokens)
        + sum(len(o.completion_tokens) for o in samples if o.prompt_tokens == s.prompt_tokens)
        for s in samples
    )
    seen: set[tuple[int, ...]] = set()
    for batch in pack(samples, budget):
        prompts = {samples[i].prompt_tokens for i in batch.order}
        assert not prompts & seen
        seen |= prompts


def _history(batch: MicroBatch, position: int) -> list[int]:
    """Return the tokens that a position of a packed row sees, ending with its own."""
    tokens, layout = batch.tokens_BT[0].tolist(), batch.layout
    assert layout is not None
    for prompt, own in layout.sequences():
        if own.start <= position < own.stop:
            return [*tokens[prompt], *tokens[own.start : position + 1]]
    prompt = next(p for p, _ in layout.groups() if p.start <= position < p.stop)
    return [*tokens[prompt.start : position + 1]]


@given(SAMPLES, BUDGETS)
def test_packed_targets_follow_the_tokens_that_predict_them(
    samples: list[TrainingSample], budget: int
) -> None:
    for batch in pack(samples, budget):
        assert batch.layout is not None
        ids = batch.layout.positions()
        for row, i in enumerate(batch.order):
            sample, mine = samples[i], batch.row_N == row
            assert tuple(batch.targets_N[mine].tolist()) == sample.completion_tokens
            for t, position in enumerate(batch.predicting_N[mine].tolist()):
                seen = [*sample.prompt_tokens, *sample.completion_tokens[:t]]
                assert _history(batch, position) == seen
                assert ids[position] == len(seen) - 1


@given(SAMPLES, BUDGETS)
def test_padded_targets_follow_the_tokens_that_predict_them(
    samples: list[TrainingSample], budget: int
) -> None:
    for batch in pack(samples, budget, is_padded=True):
        for row, i in enumerate(batch.order):
            sample, mine = samples[i], batch.row_N == row
            assert tuple(batch.targets_N[mine].tolist()) == sample.completion_tokens
            before = (*sample.prompt_tokens, *sample.completion_tokens[:-1])
            positions = batch.predicting_N[mine] - row * batch.tokens_BT.shape[1]
            assert positions[0] == len(sample.prompt_tokens) - 1
            assert tuple(batch.tokens_BT[row, : len(before)].tolist()) == before
            assert positions[-1] == len(before) - 1


@given(SAMPLES, BUDGETS)
def test_packing_is_the_same_each_time(samples: list[TrainingSample], budget: int) -> None:
    first, again = pack(samples, budget), pack(samples, budget)
    assert [b.order for b in first] == [b.order for b in again]


@given(GROUPS, st.integers(1, 5))
def test_every_group_is_on_exactly_one_rank(groups: list[list[TrainingSample]], ranks: int) -> None:
    dealt = balance(groups, ranks)
    assert len(dealt) == ranks
    assert sorted(id(g) for mine in dealt for g in mine) == sorted(map(id, groups))
    assert dealt == balance(groups, ranks)


@given(GROUPS, st.integers(1, 5))
def test_no_rank_has_more_than_the_bound_of_longest_first(
    groups: list[list[TrainingSample]], ranks: int
) -> None:
    work = [group_cost(group) for group in groups]
    longest = max(sum(group_cost(g) for g in mine) for mine in balance(groups, ranks))
    assert longest <= sum(work) / ranks + max(work, default=0) + 1e-6


def test_long_groups_are_spread() -> None:
    short, long = ([TrainingSample((3,), (4,) * n, 0.0, 0)] for n in (10, 50))
    assert balance([long, short, short, long], 2) == [[long, short], [short, long]]


def test_cost_counts_a_shared_prompt_once() -> None:
    sample = TrainingSample((3,) * 100, (4,) * 11, 0.0, 0)
    # Pairs of positions: 5,050 within the prompt, and 1,055 for each completion.
    pairs = 5050 + 3 * 1055
    assert group_cost([sample] * 3) == pytest.approx(100 + 3 * 10 + pairs / (6 * ASSUMED_WIDTH))


def test_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        balance([], 0)


@st.composite
def dialogues(draw: st.DrawFn) -> TrainingSample:
    tokens = draw(st.lists(st.integers(3, 12), min_size=3, max_size=9))
    places = sorted(draw(st.sets(st.integers(1, len(tokens) - 1), min_size=2, max_size=2)))
    return TrainingSample((7, 8), tuple(tokens), 1.0, 0, ((places[0], places[1]),))


@given(st.lists(dialogues(), min_size=1, max_size=6), BUDGETS, st.booleans())
def test_replies_are_computed_and_not_trained_on(
    samples: list[TrainingSample], budget: int, is_padded: bool
) -> None:
    plain = [replace(sample, replies=()) for sample in samples]
    for batch, whole in zip(
        pack(samples, budget, is_padded=is_padded),
        pack(plain, budget, is_padded=is_padded),
        strict=True,
    ):
        assert batch.order == whole.order
        assert batch.tokens_BT.tolist() == whole.tokens_BT.tolist()
        kept = [
            not any(start <= place < end for start, end in samples[i].replies)
            for i in batch.order
            for place in range(len(samples[i].completion_tokens))
        ]
        for name in ("predicting_N", "targets_N", "row_N"):
            assert getattr(batch, name).tolist() == getattr(whole, name)[kept].tolist()
        assert len(batch.targets_N) == sum(samples[i].sampled for i in batch.order)
