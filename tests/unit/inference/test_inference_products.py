"""Products of bfloat16 matrices in parts of float32: the same numbers, rounded once."""

import pytest
import torch
import torch.nn.functional as F

from muster.inference import products


@pytest.fixture(autouse=True)
def slow_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_IS_SLOW", True)


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("elements", [1, 100, 1 << 20])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (5, 16), (2, 3, 16)])
def test_products_are_those_of_float32_rounded_once(
    elements: int, has_bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_PASS_ELEMENTS", elements)
    x, weight, bias = drawn(*shape), drawn(23, 16), drawn(23) if has_bias else None
    found = products.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == torch.bfloat16
    assert found.shape == (*shape[:-1], 23)
    # Half a step of bfloat16, and the rounding of sums in float32.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def test_other_formats_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    assert torch.equal(products.linear(x, weight, None), F.linear(x, weight))
    monkeypatch.setattr(products, "_IS_SLOW", False)
    low = x.bfloat16(), weight.bfloat16()
    assert torch.equal(products.linear(*low, None), F.linear(*low))


def test_a_model_s_layers_multiply_so_and_still_learn() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)).bfloat16()
    x = drawn(5, 16)
    with torch.inference_mode():
        before = model(x)
    products.quicken(model)
    with torch.inference_mode():
        assert torch.allclose(model(x), before, rtol=0.02, atol=0.02)
    model(x).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
