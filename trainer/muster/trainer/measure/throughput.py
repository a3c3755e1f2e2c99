"""Speed of training: operations of a model from its shape, the machine's peak, time by phase.

Only operations that the model needs are counted (PaLM, arXiv 2204.02311, appendix B): per weight
and token two forward, two for the gradient of the input, and two for that of a trained weight.
Recomputation that saves memory is not counted, nor are norms and activation functions.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from muster.trainer.learn.recompute import blocks

if TYPE_CHECKING:
    from muster.trainer.learn.packing import Work

LEAST_PRODUCT_S = 0.002
"""A matrix product that takes fewer seconds is too small to measure a machine."""
LARGEST_WIDTH = 8192
"""Rows of the largest tried matrices."""
REPEATS = 20
"""Products that are timed; the fastest counts. They are short, so that at least one is not
interrupted."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The sizes of a model that decide how many operations it takes."""

    trained: float
    """Trained weights of the blocks' matrices that each token is multiplied with."""
    frozen: float
    """Frozen weights of the blocks' matrices that each token is multiplied with."""
    head: int
    """Weights of the head."""
    is_head_trained: bool
    """Whether the head is trained."""
    attention: int
    """Number of layers x heads x width of a head."""

    def of(self, work: Work, *, with_gradient: bool) -> float:
        """Return the operations of a forward pass, with `with_gradient` also of the backward
        pass."""
        blocks_, head = self.trained + self.frozen, self.head * work.predicted
        forward = 2 * blocks_ * work.tokens + 2 * head + 4 * self.attention * work.pairs
        if not with_gradient:
            return forward
        weights = 2 * self.trained * work.tokens + 2 * head * self.is_head_trained
        return 2 * forward + weights + 4 * self.attention * work.pairs


def cost_of(model: Any) -> ModelCost:
    """Return the sizes of a Hugging Face causal language model. Of a mixture of experts only the
    experts that a token is routed to count. Attention is assumed to reach all earlier positions.
    """
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)
    met = getattr(config, "num_experts_per_tok", None) or experts or 0
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found, sizes = blocks(model), {True: 0.0, False: 0.0}
    for block in found:
        for name, weight in block.named_parameters():
            if weight.dim() > 1:
                share = met / experts if experts and ".experts." in name else 1.0
                sizes[weight.requires_grad] += share * weight.numel()
    head = model.get_output_embeddings().weight
    return ModelCost(
        trained=sizes[True],
        frozen=sizes[False],
        head=head.numel(),
        is_head_trained=head.requires_grad,
        attention=len(found) * config.num_attention_heads * width,
    )


def measure_peak_flops(device: str, dtype: str) -> float:
    """Return the operations per second of the fastest product of square matrices in this
    process."""
    width, watch = 512, Stopwatch(torch.device(device))
    while True:
        square = torch.ones(width, width, device=device, dtype=getattr(torch, dtype))
        best = min(_product_s(square, watch) for _ in range(REPEATS))
        if best >= LEAST_PRODUCT_S or width >= LARGEST_WIDTH:
            return float(2 * width**3 / best)
        width *= 2


def _product_s(square: torch.Tensor, watch: Stopwatch) -> float:
    began = watch.now()
    torch.mm(square, square)
    return watch.now() - began


class Stopwatch:
    """Adds up durations; on a GPU until its work is done, not until it is queued."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._clock = clock

    def now(self) -> float:
        """Return the time in seconds, once all queued work is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    @contextmanager
    def during(self, sums: Any, phase: str) -> Iterator[None]:
        """Add the duration of a block to an attribute of `sums`."""
        began = self.now()
        yield
        setattr(sums, phase, getattr(sums, phase) + self.now() - began)

    def memory_bytes(self) -> float:
        """Return the peak memory of this process, or of its GPU."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
