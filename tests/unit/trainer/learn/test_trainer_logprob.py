"""Chunked log-probabilities and entropies against the full softmax in double precision."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from muster.trainer.learn import logprob
from muster.trainer.learn.logprob import Head, head_of, token_logprobs, token_objective

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "everything": {"bias": True, "scale": 1.7, "softcap": 2.0},
}


def _inputs(kind: str) -> tuple[Tensor, Head, Tensor]:
    options = dict(HEADS[kind])
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(n, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (50, 30)
    )
    bias = torch.randn(30, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(30, (50,), generator=generator)
    bias_V = bias if options.pop("bias", False) else None
    return hidden, Head(weight, bias_V, **options), targets  # type: ignore[arg-type]


def _reference(
    hidden: Tensor, head: Head, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.weight_VD.T
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    p = torch.softmax(logits / temperature, -1)
    chosen = p[torch.arange(len(targets)), targets]
    return chosen.log(), torch.special.entr(p).sum(-1)


def _gradients_of(hidden: Tensor, head: Head) -> list[Tensor]:
    gradients = [p.grad for p in (hidden, head.weight_VD, head.bias_V) if p is not None]
    return [gradient for gradient in gradients if gradient is not None]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of sixteen tokens in blocks of five: fifty tokens end with a short chunk and block."""
    monkeypatch.setattr(logprob, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(logprob, "BLOCK_LOGITS", 150)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_are_those_of_the_full_softmax(kind: str, temperature: float) -> None:
    hidden, head, targets = _inputs(kind)
    expected = _reference(hidden, head, targets, temperature)
    found = token_logprobs(hidden, head, targets, temperature)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_gradients_are_those_of_autograd(
    kind: str, temperature: float, entropy_weight: float
) -> None:
    gradients = []
    for function in (token_logprobs, _reference):
        hidden, head, targets = _inputs(kind)
        logp, entropy = function(hidden, head, targets, temperature)
        weight = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
        (weight * logp + entropy_weight * weight * entropy).sum().backward()
        parameters = [hidden, head.weight_VD, head.bias_V]
        gradients.append([p.grad for p in parameters if p is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_one_pass_has_the_gradients_of_autograd(kind: str, factor: float) -> None:
    weight_N = torch.linspace(-1, 2, 50, dtype=torch.float64)

    def objective(logp_R: Tensor, entropy_R: Tensor, rows: slice) -> Tensor:
        return weight_N[rows] * logp_R.exp() - 0.3 * entropy_R**2

    found, expected = [], []
    hidden, head, targets = _inputs(kind)
    total, logp, entropy = token_objective(hidden, head, targets, 0.6, objective)
    (factor * total).backward()
    found = [total.detach(), logp, entropy, *_gradients_of(hidden, head)]
    assert not logp.requires_grad
    hidden, head, targets = _inputs(kind)
    logp, entropy = _reference(hidden, head, targets, 0.6)
    total = objective(logp, entropy, slice(None)).sum()
    (factor * total).backward()
    expected = [total.detach(), logp.detach(), entropy.detach(), *_gradients_of(hidden, head)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_pass_asks_for_each_token_once() -> None:
    hidden, head, targets = _inputs("plain")
    asked: list[int] = []

    def objective(logp_R: Tensor, _: Tensor, rows: slice) -> Tensor:
        asked.extend(range(rows.start, rows.stop))
        return logp_R

    token_objective(hidden, head, targets, 1.0, objective)
    assert asked == list(range(50))


def test_one_pass_through_a_loss_without_slope_has_no_gradient() -> None:
    hidden, head, targets = _inputs("plain")
    total, *_ = token_objective(
        hidden, head, targets, 1.0, lambda logp_R, _h, _rows: torch.ones_like(logp_R) + 0 * logp_R
    )
    total.backward()
    assert float(total.detach()) == 50
    assert not any(gradient.any() for gradient in _gradients_of(hidden, head))


def test_gradients_in_bfloat16_are_those_of_float32_up_to_its_rounding() -> None:
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        hidden, head, targets = _inputs("plain")
        hidden_ND, weight_VD = (
            t.detach().to(torch.bfloat16).to(dtype).requires_grad_()
            for t in (hidden, head.weight_VD)
        )
        logp, _ = token_logprobs(hidden_ND, Head(weight_VD, None), targets, 1.0)
        (logp * torch.linspace(-1, 2, 50)).sum().backward()
        gradients.append([t.grad for t in (hidden_ND, weight_VD)])
    for exact, rounded in zip(*gradients, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert float((exact - rounded).norm() / exact.norm()) < 0.01


def test_values_without_gradient_are_the_same() -> None:
    hidden, head, targets = _inputs("everything")
    expected = token_logprobs(hidden, head, targets, 0.6)
    with torch.no_grad():
        found = token_logprobs(hidden, head, targets, 0.6)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_logits_of_all_tokens_never_exist_at_once() -> None:
    class Largest(TorchFunctionMode):
        rows = 0

        def __torch_function__(
            self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.shape[1:] == (30,):
                self.rows = max(self.rows, result.shape[0])
            return result

    hidden, head, targets = _inputs("plain")
    with Largest() as largest:
        logp, entropy = token_logprobs(hidden, head, targets, 1.0)
        (logp.sum() + entropy.sum()).backward()
    # 30 is also the weight's number of rows, not of columns.
    assert largest.rows == 16


@pytest.mark.parametrize("is_one_pass", [False, True])
def test_logits_of_one_chunk_are_freed_before_the_next_are_made(
    monkeypatch: pytest.MonkeyPatch, is_one_pass: bool
) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def linear(*arguments: Any) -> Tensor:
        alive.append(sum(each() is not None for each in made))
        logits = nn.functional.linear(*arguments)
        # Views keep the storage, not the tensor.
        made.append(weakref.ref(logits.untyped_storage()))
        return logits

    monkeypatch.setattr(logprob, "functional", SimpleNamespace(linear=linear))
    hidden, head, targets = _inputs("plain")
    if is_one_pass:
        token_objective(hidden, head, targets, 1.0, lambda logp, _entropy, _rows: -logp)
    else:
        logp, _ = token_logprobs(hidden, head, targets, 1.0)
        logp.sum().backward()
    assert alive == [0] * (4 if is_one_pass else 8)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1.0, 0.0)),
        ({"logit_scale": 0.0625}, (0.0625, 0.0)),
        ({"logits_scaling": 8.0}, (0.125, 0.0)),
        ({"final_logit_softcapping": 30.0}, (1.0, 30.0)),
        ({"final_logit_softcapping": None}, (1.0, 0.0)),
    ],
)
def test_head_knows_what_models_do_to_their_logits(
    config: dict[str, float | None], expected: tuple[float, float]
) -> None:
    layer = nn.Linear(8, 30)
    model = SimpleNamespace(config=SimpleNamespace(**config), get_output_embeddings=lambda: layer)
    head = head_of(model)
    assert (head.scale, head.softcap) == expected
    assert head.weight_VD is layer.weight
    assert head.bias_V is layer.bias
