"""Rows that several ranks share have the same gradients as in one process. The ranks are threads
here, and processes in `tests/integration/trainer/test_trainer_ranks.py`.
"""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    PretrainedConfig,
    Qwen3Config,
)
from worlds.tiny_shapes import COMMON, GEMMA, LAYOUTS, uneven_samples

from muster.protocol.errors import ConfigError
from muster.trainer.learn.attention import NAME, packed_attention
from muster.trainer.learn.cascade import Layout, _Varlen, cascade
from muster.trainer.learn.context import BatchPart, LayoutPart, RowRanks
from muster.trainer.learn.logprob import head_of, token_logprobs, token_objective
from muster.trainer.learn.packing import MicroBatch, TrainingSample, Work, pack
from muster.trainer.learn.parallel import Ranks
from muster.trainer.learn.recompute import Lane, Recompute, recompute
from muster.trainer.learn.sharded import Blueprint
from muster.trainer.learn.trained_model import require_parts

T = TypeVar("T")


class Meeting:
    """A place where threads exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, place: int, own: T) -> list[T]:
        """Return the value of each thread."""
        self._given[place] = own
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class Rank:
    """A thread as a rank of a group."""

    def __init__(self, meeting: Meeting, place: int) -> None:
        self.size, self.place, self._meeting = meeting.size, place, meeting

    def gather(self, own: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.place, own)

    def sum_of(self, parts: list[Tensor]) -> Tensor:
        found = self._meeting.exchange(self.place, parts)
        return torch.stack([given[self.place] for given in found]).sum(0)

    def add(self, own: Tensor) -> None:
        own.copy_(torch.stack(self._meeting.exchange(self.place, own.clone())).sum(0))


class Forgetful(Rank):
    """A rank that keeps the gradients of others' keys and values to itself."""

    def sum_of(self, parts: list[Tensor]) -> Tensor:
        return parts[self.place]


def together(work: Callable[[RowRanks], T], size: int, kind: type[Rank] = Rank) -> list[T]:
    """Return the result of each rank's thread."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda place: work(kind(meeting, place)), range(size)))


Attend = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]


def by_cascade(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    return cascade(query, key, value, layout, 0.3)


def by_mask(query: Tensor, key: Tensor, value: Tensor, layout: Layout, **options: Any) -> Tensor:
    module = torch.nn.Identity()
    return packed_attention(module, query, key, value, None, packed_layout=layout, **options)[0]


def inputs(width: int, seed: int) -> list[Tensor]:
    """Return query, key, value and the gradient of the output; a key has two query heads."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [draw(1, 4, width, 8), draw(1, 2, width, 8), draw(1, 2, width, 8), draw(1, width, 4, 8)]


def results(attend: Attend, given: list[Tensor], layout: Layout) -> list[Tensor]:
    """Return the output and the gradients of query, key and value; axis 0 is the position."""
    *leaves, gradient = (t.clone() for t in given)
    out = attend(*(leaf.requires_grad_() for leaf in leaves), layout)
    (out * gradient).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    return [out.detach()[0], *(g[0].transpose(0, 1) for g in grads if g is not None)]


def in_parts(
    attend: Attend, given: list[Tensor], layout: Layout, size: int, kind: type[Rank] = Rank
) -> list[Tensor]:
    """Return the same as `results`, computed by ranks that share the row."""

    def work(group: RowRanks) -> tuple[Tensor, list[Tensor]]:
        part = LayoutPart.of(layout, group)
        axes = (2, 2, 2, 1)
        filled = [
            torch.cat([t, t.narrow(axis, 0, 1).repeat_interleave(part.filling, axis)], axis)
            for t, axis in zip(given[:3], axes, strict=False)
        ]
        filled.append(torch.cat([given[3], torch.zeros(1, part.filling, 4, 8)], 1).double())
        places = torch.cat([torch.arange(p.start, p.stop) for p in part.places()])
        own = [t.index_select(axis, places) for t, axis in zip(filled, axes, strict=True)]
        return places, results(attend, own, part)

    found = together(work, size, kind)
    places = torch.cat([own for own, _ in found]).argsort()
    whole = [torch.cat(parts)[places] for parts in zip(*(r for _, r in found), strict=True)]
    return [t[: layout.width] for t in whole]


@settings(max_examples=30, deadline=None)
@given(LAYOUTS, st.integers(2, 5), st.integers(0, 1000))
def test_cascade_in_parts_is_that_of_the_row(layout: Layout, size: int, seed: int) -> None:
    given_ = inputs(layout.width, seed)
    found = in_parts(by_cascade, given_, layout, size)
    for ours, theirs in zip(found, results(by_cascade, given_, layout), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"sliding_window": 4}, {"softcap": 2.0}])
@settings(max_examples=10, deadline=None)
@given(layout=LAYOUTS, size=st.integers(2, 4))
def test_masked_attention_in_parts_is_that_of_the_row(
    options: dict[str, Any], layout: Layout, size: int
) -> None:
    attend = partial(by_mask, **options)
    given_ = inputs(layout.width, 1)
    found = in_parts(attend, given_, layout, size)
    for ours, theirs in zip(found, results(attend, given_, layout), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("attend", [by_cascade, partial(by_mask, softcap=2.0)])
def test_gradients_of_keys_are_others_where_ranks_do_not_sum_them_up(attend: Attend) -> None:
    layout = Layout((9, 7), ((8, 6), (12, 3)))
    given_ = inputs(layout.width, 1)
    out, query, key, value = in_parts(attend, given_, layout, 2, Forgetful)
    expected = results(attend, given_, layout)
    torch.testing.assert_close([out, query], expected[:2])
    for ours, theirs in zip((key, value), expected[2:], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) > 0.05


class PlainVarlen(_Varlen):
    """A GPU kernel's result, computed in plain torch; the kernel runs only on a GPU."""

    def _scores(self, q: Tensor, k: Tensor, *, is_causal: bool) -> Tensor:
        scores = torch.einsum("qhe,khe->hqk", q, k) * self._scale
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        return scores.masked_fill(~seen.tril(), -torch.inf) if is_causal else scores

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: list[list[int]], *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
        for s, t in _pieces(bounds):
            scores = self._scores(q[s], k[t], is_causal=is_causal)
            lse[:, s] = scores.logsumexp(-1)
            out[s] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v[t])
        return out, lse

    def _call_backward(
        self, saved: tuple[Tensor, ...], bounds: list[list[int]], *, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, q, k, v, o, lse = saved
        dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
        for s, t in _pieces(bounds):
            p = (self._scores(q[s], k[t], is_causal=is_causal) - lse[:, s, None]).exp()
            slope = torch.einsum("qhe,khe->hqk", g[s], v[t]) - (g[s] * o[s]).sum(-1).T[..., None]
            dq[s] = torch.einsum("hqk,khe->qhe", p * slope, k[t]) * self._scale
            dk[t] = torch.einsum("hqk,qhe->khe", p * slope, q[s]) * self._scale
            dv[t] = torch.einsum("hqk,qhe->khe", p, g[s])
        return dq, dk, dv


def _pieces(bounds: list[list[int]]) -> list[tuple[slice, slice]]:
    asking, asked = ([slice(*ends) for ends in pairwise(each)] for each in bounds)
    return [(s, t) for s, t in zip(asking, asked, strict=True) if s.start < s.stop]


@settings(max_examples=20, deadline=None)
@given(LAYOUTS, st.integers(1, 4))
def test_a_gpu_is_asked_for_the_same(layout: Layout, size: int) -> None:
    given_ = inputs(layout.width, 2)
    expected = results(by_cascade, given_, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muster.trainer.learn.cascade._PerSequence", PlainVarlen)
        if size == 1:
            found = results(by_cascade, given_, layout)
        else:
            found = in_parts(by_cascade, given_, layout, size)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def parts_of(batch: MicroBatch, size: int) -> list[BatchPart]:
    meeting = Meeting(size)
    return [BatchPart.of(batch, Rank(meeting, place)) for place in range(size)]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_token_is_one_ranks(size: int) -> None:
    (batch,) = pack(uneven_samples(), 1000)
    parts = parts_of(batch, size)
    assert len({part.batch.tokens_BT.shape for part in parts}) == 1
    tokens = torch.cat([part.tokens_M for part in parts])
    assert tokens.sort().values.tolist() == list(range(len(batch.targets_N)))
    for part in parts:
        assert torch.equal(part.batch.targets_N, batch.targets_N[part.tokens_M])
        assert torch.equal(part.batch.row_N, batch.row_N[part.tokens_M])
    assert Work(*map(sum, zip(*(part.batch.work for part in parts), strict=True))) == batch.work


def test_ranks_have_about_as_many_pairs() -> None:
    # The last of four equal parts in a row would have seven times the pairs of the first.
    (batch,) = pack([TrainingSample((3,), (4,) * 800)], 1000)
    pairs = []
    for part in parts_of(batch, 4):
        layout = part.batch.layout
        assert layout is not None
        own = sum(run * (run + 1) // 2 for run in layout.runs())
        rounds = [pair for pairs_ in layout.rounds() for pair in pairs_]
        pairs.append(own + sum(_area(pair.asking) * _area(pair.asked) for pair in rounds))
    assert sum(pairs) == batch.work.pairs
    assert max(pairs) < 1.02 * min(pairs)


def _area(range_: slice) -> int:
    return int(range_.stop - range_.start)


def test_positions_that_fill_up_are_known_to_every_model() -> None:
    (batch,) = pack([TrainingSample((3,), (4,) * 60)], 1000)
    for part in parts_of(batch, 4):
        assert part.batch.layout is not None
        assert max(part.batch.layout.positions()) < 60


def test_padded_rows_have_no_parts() -> None:
    (batch,) = pack(uneven_samples()[:1], 1000, is_padded=True)
    with pytest.raises(ValueError, match="padded rows have no parts"):
        parts_of(batch, 2)


def test_models_without_packed_rows_are_refused() -> None:
    ranks, padded = Ranks(), Blueprint(None, is_packed=False)
    require_parts(torch.nn.Identity(), padded, ranks)
    ranks.context = 2
    require_parts(torch.nn.Identity(), Blueprint(None, is_packed=True), ranks)
    with pytest.raises(ConfigError, match="Identity has its own kind of attention") as caught:
        require_parts(torch.nn.Identity(), padded, ranks)
    assert caught.value.hint == "use --context-ranks 1"


def _model(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.set_attn_implementation(NAME)
    return model


def _flat(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _by_sample(logp_N: Tensor, entropy_N: Tensor, row_N: Tensor) -> Tensor:
    """Return a loss in which each sample's mean stands in an exponent."""
    sums = torch.zeros(int(row_N.max()) + 1, dtype=logp_N.dtype).index_add(0, row_N, logp_N)
    return (sums / row_N.bincount()).exp().sum() + 0.1 * entropy_N.sum()


@pytest.mark.parametrize("loss", ["of tokens", "of samples"])
@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**COMMON),
        Gemma2Config(**GEMMA, sliding_window=4),
        GPT2Config(
            vocab_size=40,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=60,
            eos_token_id=1,
            bos_token_id=None,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_models_gradient_is_the_sum_of_the_ranks(config: PretrainedConfig, loss: str) -> None:
    model = _model(config)
    (batch,) = pack(uneven_samples(), 1000)
    weight_N = torch.linspace(-1, 1, len(batch.targets_N), dtype=torch.float64)

    def of_tokens(logp_R: Tensor, entropy_R: Tensor, rows: Any) -> Tensor:
        return (logp_R + 0.1 * entropy_R) * weight_N[rows]

    def gradient(group: RowRanks | None) -> Tensor:
        own = copy.deepcopy(model)
        part = BatchPart.of(batch, group) if group else None
        computed = part.batch if part else batch
        hidden, targets = computed.hidden(own), computed.targets_N
        if loss == "of tokens":
            asked = part.objective(of_tokens) if part else of_tokens
            total = token_objective(hidden, head_of(own), targets, 0.9, asked)[0]
        else:
            values = token_logprobs(hidden, head_of(own), targets, 0.9)
            total = _by_sample(*map(part.whole, values) if part else values, batch.row_N)
        total.backward()  # type: ignore[no-untyped-call]  # torch's stub
        return _flat(own)

    expected = gradient(None)
    found = torch.stack(together(gradient, 3)).sum(0)
    # Models round to float32 inside even in float64.
    assert float((found - expected).norm() / expected.norm()) < 1e-6


class Elsewhere(Lane):
    """Brings back the numbers of other positions."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source.roll(1, 1))


def test_inputs_of_each_ranks_part_wait_on_the_host() -> None:
    model = _model(Qwen3Config(**{**COMMON, "num_hidden_layers": 3}))
    (batch,) = pack(uneven_samples(), 1000)

    def gradient(kind: Recompute, lane: type[Lane], group: RowRanks) -> Tensor:
        own = copy.deepcopy(model)
        recompute(own, kind, lane(torch.device("cpu")))
        hidden = BatchPart.of(batch, group).batch.hidden(own)
        hidden.square().sum().backward()  # type: ignore[no-untyped-call]  # torch's stub
        return _flat(own)

    ways: list[tuple[Recompute, type[Lane]]] = [
        *(("none", Lane), ("host", Lane), ("host", Elsewhere))
    ]
    kept, sent, wrong = (together(partial(gradient, *way), 2) for way in ways)
    for one, other, another in zip(kept, sent, wrong, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, another)
