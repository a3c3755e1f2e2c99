"""Activations that the backward pass computes again instead of keeping them (Chen et al. 2016,
arXiv 1604.06174).

* none: everything that a gradient needs is kept.
* selective: what is inside each block's feed-forward part is computed again: more than half of the
  activations, for less than a fifth more work.
* full: only each block's input is kept, and the block computed again: a third more work.
* host: the same, and the inputs wait in the host's memory, so that a GPU holds two of them at a
  time, however many blocks there are.

The same operations run again on the same numbers, so the gradient is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from muster.protocol.errors import ConfigError

Recompute = Literal["none", "selective", "full", "host"]
"""What the backward pass computes again."""


def recompute(model: Any, kind: Recompute, lane: Lane | None = None) -> None:
    """Have a model's blocks computed again, in place, whenever a gradient is made.

    Call it before the model is sharded. Raises ConfigError when it has no part of that kind. `lane`
    copies the inputs of kind `host`; the default is the lane of the inputs' device.
    """
    if kind == "none":
        return
    parts = [part for block in blocks(model) for part in _parts(block, kind)]
    if not parts:
        raise ConfigError(
            f"nothing of a {type(model).__name__} can be computed again ({kind})",
            hint="use --recompute none or full",
        )
    waiting = WaitingInputs(len(parts), lane) if kind == "host" else None
    for place, part in enumerate(parts):
        keeping = partial(waiting.hooks, place) if waiting else nullcontext
        part.forward = Again(part.forward, keeping)


def blocks(model: Any) -> list[Any]:
    """Return a model's decoder blocks."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _parts(block: Any, kind: Recompute) -> Iterator[Any]:
    if kind == "selective":
        yield from feed_forward_parts(block)
    else:
        yield block


def feed_forward_parts(block: Any) -> Iterator[Any]:
    """Yield the parts of a block that have products of matrices and are not attention."""
    for name, part in block.named_children():
        has_products = any(isinstance(m, torch.nn.Linear) for m in part.modules())
        if has_products and "attn" not in name and "attention" not in name:
            yield part


class Again:
    """A forward pass of which only the inputs are kept."""

    def __init__(
        self,
        inner: Callable[..., Any],
        keeping: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`keeping` returns a context in which inputs are saved."""
        self.inner, self._keeping = inner, keeping

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return what the pass returns."""
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **options)
        with self._keeping():
            # Nothing draws random numbers: dropout is off.
            return checkpoint(
                self.inner, *inputs, use_reentrant=False, preserve_rng_state=False, **options
            )


# --------------------------------------------------------------- inputs in the host's memory


class Lane:
    """Copies between a device and the host's memory; this class copies at once, for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def room(self, like: Tensor) -> Tensor:
        """Return a tensor on the host for a copy of `like`."""
        return torch.empty_like(like, device="cpu")

    def copy(self, source: Tensor, target: Tensor) -> Any:
        """Begin a copy after the work that is queued on the device; returns what `wait` takes."""
        target.copy_(source)

    def wait(self, copy: Any) -> None:
        """Have all later work of the device begin after a copy."""


class GpuLane(Lane):
    """Copies on a stream of their own while the GPU computes; the host waits for none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub

    def room(self, like: Tensor) -> Tensor:
        """As `Lane.room`; pinned, and torch keeps it for later tensors of about that size."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def copy(self, source: Tensor, target: Tensor) -> Any:
        """As `Lane.copy`."""
        # Queued work may still write the source, or read what the target's memory held before.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, copy: Any) -> None:
        """As `Lane.wait`."""
        torch.cuda.current_stream(self.device).wait_event(copy)


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """A block's input between forward and backward pass."""

    place: int
    """Number of the block."""
    tensor: Tensor
    """Its copy on the host; for the last block, which the backward pass needs first, itself."""
    before: _Input | None
    """The input of the block before."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that the device has not waited for."""

    of: _Input
    """The input that is copied."""
    tensor: Tensor
    """The device's tensor that it reads or writes."""
    done: Any
    """What `Lane.copy` returned."""


class WaitingInputs:
    """Inputs of a model's blocks that wait on the host from the forward to the backward pass.

    An input leaves while its block computes, and comes back while the block after it is computed
    again. The device's own stream waits for a copy before the tensor is let go, so that its memory
    is free in that stream's order. With `record_stream` it would be free when the host sees the
    copy end, and a host that is a pass ahead of its device would find none free.
    """

    def __init__(self, blocks: int, lane: Lane | None = None) -> None:
        self._last, self._lane = blocks - 1, lane
        self._newest: _Input | None = None
        self._running: _Copy | None = None

    def hooks(self, place: int) -> saved_tensors_hooks:
        """Return a context in which the inputs that a block's checkpoint saves are sent away."""
        return saved_tensors_hooks(partial(self._keep, place), self._give)

    def _keep(self, place: int, given: Tensor) -> _Input | Tensor:
        if given.dim() != 3 or not given.is_floating_point():
            return given  # A mask, which all blocks share.
        lane = self._lane = self._lane or lane_of(given.device)
        self._settle(lane)
        before = self._newest if place else None
        if place == self._last:
            self._newest = None
            return _Input(place, given, before)
        own = self._newest = _Input(place, lane.room(given), before)
        self._running = _Copy(own, given, lane.copy(given, own.tensor))
        return own

    def _give(self, kept: _Input | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        assert self._lane is not None
        found = kept.tensor
        if kept.place < self._last:
            found = self._fetched(kept, self._lane).tensor
            self._settle(self._lane)
        if kept.before is not None:
            self._fetched(kept.before, self._lane)
        return found

    def _fetched(self, kept: _Input, lane: Lane) -> _Copy:
        """Return the copy that brings an input back; begins it unless it is running."""
        if self._running is None or self._running.of is not kept:
            self._settle(lane)
            back = torch.empty_like(kept.tensor, device=lane.device)
            self._running = _Copy(kept, back, lane.copy(kept.tensor, back))
        return self._running

    def _settle(self, lane: Lane) -> None:
        """Have the device wait for the running copy, and let its tensor go."""
        if self._running is not None:
            lane.wait(self._running.done)
            self._running = None


def lane_of(device: torch.device) -> Lane:
    """Return the lane between a device and the host."""
    return GpuLane(device) if device.type == "cuda" else Lane(device)
