"""The operations between a layer's products: others are used only where they round alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from muster.inference.layer_math import HALF, LayerMath, Norm, is_same, math_on

CPU = torch.device("cpu")


class JoinedProducts(LayerMath):
    """Does not round a product that is added, as a compiler does that joins the two operations."""

    def turn(
        self,
        heads_NAE: torch.Tensor,
        norm: Norm | None,
        cos_N1E: torch.Tensor,
        sin_N1E: torch.Tensor,
    ) -> None:
        """Rotate in float32."""
        heads = heads_NAE if norm is None else self.norm(heads_NAE, norm)
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        heads_NAE.copy_(heads.float() * cos_N1E.float() + swapped.float() * sin_N1E.float())


class UnroundedNorm(LayerMath):
    """Multiplies by the weight before it rounds."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the norm as of float32."""
        return super().norm(x.float(), norm._replace(weight=norm.weight.float())).to(x.dtype)


class UnroundedGate(LayerMath):
    """Keeps the activation in float32."""

    def gated(
        self, activation: Callable[[torch.Tensor], Any], gate: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """Return the product of float32."""
        return super().gated(activation, gate.float(), up.float()).to(gate.dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_operations_are_the_same_as_themselves(dtype: torch.dtype) -> None:
    assert is_same(LayerMath(), LayerMath(), CPU, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("other", [JoinedProducts, UnroundedNorm, UnroundedGate])
def test_operations_that_round_less_often_are_not_the_same(
    other: type[LayerMath], dtype: torch.dtype
) -> None:
    assert not is_same(other(), LayerMath(), CPU, dtype)


def test_a_cpu_computes_by_torch() -> None:
    assert type(math_on(CPU, torch.bfloat16)) is LayerMath
