"""Computing in a shorter number format than the weights are kept in.

The optimiser's weights stay in float32. Forward and backward passes run on a copy in the compute
format, which is made from them once per optimiser step; each gradient is added to the float32
weight's gradient as soon as the backward pass has it, so micro-batches add up without loss.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from muster.trainer.adapter import is_adapted

ComputeType = Literal["float32", "bfloat16"]
"""Number formats that forward and backward passes can run in."""


class ComputeCopy:
    """The model that computes for the one whose weights are trained."""

    def __init__(self, trained: Any, dtype: ComputeType) -> None:
        """With float32 the trained model computes itself. So does one with an adapter: what is not
        trained of it is shortened, and needs no copy.
        """
        self._trained = trained
        self.model = trained
        if dtype == "float32":
            return
        if is_adapted(trained):
            shorten(trained, getattr(torch, dtype), but_trained=True)
        else:
            self.model = _twin(trained, getattr(torch, dtype))

    def refresh(self) -> None:
        """Take over the trained weights; due before the first micro-batch of an optimiser step."""
        if self.model is self._trained:
            return
        with torch.no_grad():
            pairs = zip(self.model.parameters(), self._trained.parameters(), strict=True)
            for own, trained in pairs:
                own.copy_(trained)


def shorten(model: Any, dtype: torch.dtype, *, but_trained: bool = False) -> Any:
    """Return the model with its parameters in another format, perhaps those alone that are not
    trained; its buffers keep theirs.
    """
    for parameter in model.parameters():
        if not (but_trained and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)
    return model


def _twin(trained: Any, dtype: torch.dtype) -> Any:
    twin = shorten(copy.deepcopy(trained), dtype)
    for own, master in zip(twin.parameters(), trained.parameters(), strict=True):
        if own.requires_grad:
            own.register_post_accumulate_grad_hook(partial(_hand_over, master=master))
    return twin


def _hand_over(own: Tensor, *, master: Tensor) -> None:
    assert own.grad is not None
    if master.grad is None:
        master.grad = own.grad.to(master.dtype)
    else:
        master.grad += own.grad
    own.grad = None
