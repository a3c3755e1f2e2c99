"""Products of bfloat16 matrices on a CPU that has no instruction for them.

Such a CPU multiplies bfloat16 numbers one by one, at a tenth of its float32 speed. Here weights are
converted to float32 some at a time, which is exact. Products are summed in float32, as the
instructions for bfloat16 do, and rounded once. Axes: N rows, I input and O output units.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

FEWEST_ROWS = 3
"""With fewer rows, reading float32 weights costs more than it saves."""

_PASS_ELEMENTS = 1 << 20
"""Weights converted at a time: 4 MiB, so that they are still in the cache when multiplied."""


def has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices by itself."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


_IS_SLOW = not has_bfloat16()


def linear(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """Return `torch.nn.functional.linear` of x [..., I], in its format."""
    rows = x.numel() // x.shape[-1]
    is_slow = _IS_SLOW and weight_OI.dtype == torch.bfloat16 and weight_OI.device.type == "cpu"
    if not is_slow or rows < FEWEST_ROWS or x.dtype != torch.bfloat16:
        return F.linear(x, weight_OI, bias_O)
    x_NI = x.reshape(rows, -1).float()
    found_NO = x.new_empty(rows, len(weight_OI))
    step = max(1, _PASS_ELEMENTS // weight_OI.shape[1])
    for start in range(0, len(weight_OI), step):
        units = slice(start, start + step)
        bias = None if bias_O is None else bias_O[units].float()
        found_NO[:, units] = F.linear(x_NI, weight_OI[units].float(), bias)
    return found_NO.view(*x.shape[:-1], -1)


def quicken(model: Any) -> None:
    """Make the linear layers of any loaded model use `linear`, where that is faster."""
    layers: list[Any] = [m for m in model.modules() if type(m) is torch.nn.Linear]
    for layer in layers:
        if _IS_SLOW and layer.weight.dtype == torch.bfloat16:
            layer.forward = partial(_forward, layer)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        # `linear` writes in place, so it cannot be differentiated.
        return F.linear(x, module.weight, module.bias)
    return linear(x, module.weight, module.bias)
