"""Blocks' inputs that wait on the host: when they leave and come back, and the same gradient.

No test needs a GPU. `Late` replaces its stream: a copy is made only when it is waited for, and its
target holds NaN until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from worlds.tiny_shapes import COMMON

from muster.protocol.recipe import AdapterRecipe
from muster.trainer.learn import recompute
from muster.trainer.learn.attention import NAME, packed_hidden
from muster.trainer.learn.cascade import Layout
from muster.trainer.learn.cheaper import narrow, quicken
from muster.trainer.learn.persistence import add_adapter

CPU = torch.device("cpu")
BLOCKS = 4
LAYOUT = Layout((5, 4), ((3, 2), (0,)))
TOKENS = torch.arange(LAYOUT.width) * 7 % 40
PREDICTING = torch.tensor([4, 7, 8, 9, 10, 11, 12, 13])


class Late(recompute.Lane):
    """Makes each copy as late as a stream may."""

    def copy(self, source: Tensor, target: Tensor) -> Callable[[], object]:
        target.fill_(torch.nan)
        # If the source is freed before the copy is made, the copy fails.
        given = weakref.ref(source)
        return lambda: target.copy_(given())

    def wait(self, copy: Callable[[], object]) -> None:
        copy()


class Unawaited(Late):
    """Lets the device compute before the input that it needs is back."""

    def wait(self, copy: Callable[[], object]) -> None:
        del copy


class Swapped(recompute.Lane):
    """Copies each position's numbers to the next position."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source.roll(1, 1))


def build(kind: recompute.Recompute, lane: recompute.Lane | None = None, rank: int = 0) -> Any:
    """Return a model with this kind of recomputation; only `host` takes a lane."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**COMMON, "num_hidden_layers": BLOCKS}))
    if rank:
        add_adapter(model, AdapterRecipe(rank=rank))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.train().set_attn_implementation(NAME)
    quicken(model)
    recompute.recompute(model, kind, lane)
    narrow(model)
    return model


def gradient(model: Any, passes: int = 2) -> Tensor:
    """Return the gradient of `passes` packed rows that pass the model one after the other."""
    for number in range(passes):
        hidden = packed_hidden(model, (TOKENS + number) % 40, LAYOUT, PREDICTING)[PREDICTING]
        hidden.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("rank", [0, 2], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("lane", [recompute.Lane, Late])
def test_gradient_is_the_same_bit_for_bit(lane: type[recompute.Lane], rank: int) -> None:
    expected = gradient(build("none", rank=rank))
    assert torch.equal(gradient(build("host", lane(CPU), rank)), expected)


@pytest.mark.parametrize("rank", [0, 2], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("lane", [Unawaited, Swapped])
def test_gradient_is_another_of_other_inputs(lane: type[recompute.Lane], rank: int) -> None:
    expected = gradient(build("none", rank=rank))
    assert not torch.equal(gradient(build("host", lane(CPU), rank)), expected)


def test_gradient_is_the_same_after_a_pass_that_was_given_up() -> None:
    model = build("host", Late(CPU))
    hidden = packed_hidden(model, TOKENS.flip(0), LAYOUT, PREDICTING)
    recompute.blocks(model)[1].mlp.forward = partial(_stop, recompute.blocks(model)[1].mlp.forward)
    with pytest.raises(ZeroDivisionError):
        hidden.sum().backward()
    recompute.blocks(model)[1].mlp.forward = recompute.blocks(model)[1].mlp.forward.args[0]
    model.zero_grad(set_to_none=True)
    assert torch.equal(gradient(model), gradient(build("none")))


def _stop(*_: Any) -> None:
    raise ZeroDivisionError


# --------------------------------------------------------------------------- inputs on the device


@contextmanager
def watched(model: Any) -> Iterator[list[weakref.ref[Any]]]:
    """Yield a list that the forward pass fills with the storages of the blocks' inputs."""
    seen: list[weakref.ref[Any]] = []

    def look(_module: Any, given: tuple[Tensor, ...]) -> None:
        seen.append(weakref.ref(given[0].untyped_storage()))

    hooks = [block.register_forward_pre_hook(look) for block in recompute.blocks(model)]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("kind", "alive"), [("host", [3]), ("full", [0, 1, 2, 3])], ids=["host", "full"]
)
def test_inputs_leave_the_device_before_the_backward_pass(
    kind: recompute.Recompute, alive: list[int]
) -> None:
    model = build(kind, Late(CPU))
    with watched(model) as seen:
        hidden = packed_hidden(model, TOKENS, LAYOUT, PREDICTING)
    assert [place for place, storage in enumerate(seen) if storage() is not None] == alive
    hidden.sum().backward()
    del hidden
    assert all(storage() is None for storage in seen)


class Recorded(Late):
    """Logs each copy out, copy back and wait, with the number of the block."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.log: list[str] = []
        self.rooms: list[weakref.ref[Tensor]] = []

    def room(self, like: Tensor) -> Tensor:
        made = super().room(like)
        self.rooms.append(weakref.ref(made))
        return made

    def copy(self, source: Tensor, target: Tensor) -> Callable[[], object]:
        rooms = [room() for room in self.rooms]
        (place,) = [i for i, room in enumerate(rooms) if room is source or room is target]
        way = "out" if rooms[place] is target else "back"
        self.log.append(f"{way} {place}")
        made = super().copy(source, target)

        def finish() -> None:
            self.log.append(f"{way} {place} awaited")
            made()

        return finish


def test_inputs_come_back_in_reverse_one_block_ahead() -> None:
    lane = Recorded()
    model = build("host", lane)
    for place, block in enumerate(recompute.blocks(model)):
        block.self_attn.register_forward_pre_hook(
            lambda _m, _g, place=place: lane.log.append(f"block {place}")
        )
    hidden = packed_hidden(model, TOKENS, LAYOUT, PREDICTING)
    assert lane.log == [
        *("out 0", "block 0", "out 0 awaited"),
        *("out 1", "block 1", "out 1 awaited"),
        *("out 2", "block 2", "out 2 awaited", "block 3"),
    ]
    lane.log.clear()
    hidden.sum().backward()
    assert lane.log == [
        *("back 2", "block 3"),
        *("back 2 awaited", "back 1", "block 2"),
        *("back 1 awaited", "back 0", "block 1"),
        *("back 0 awaited", "block 0"),
    ]
    del hidden
    assert [room() for room in lane.rooms] == [None] * 3


def test_without_gradient_nothing_is_sent() -> None:
    lane = Recorded()
    with torch.no_grad():
        packed_hidden(build("host", lane), TOKENS, LAYOUT, PREDICTING)
    assert lane.log == []


def test_masks_stay_where_they_are() -> None:
    lane = Recorded()
    waiting = recompute.WaitingInputs(2, lane)
    mask, positions = torch.ones(1, 1, 4, 4), torch.ones(1, 4, 8, dtype=torch.int64)
    assert waiting._keep(0, mask) is mask
    assert waiting._give(positions) is positions
    assert waiting._keep(0, positions) is positions
    assert lane.log == []
    waiting._keep(0, torch.ones(1, 4, 8))
    assert lane.log == ["out 0"]


# -------------------------------------------------------------------------------- a GPU's own lane


class Stream:
    """A CUDA stream that logs its calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self._log.append(f"{self.name} records")
        return "event"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")


class Copied:
    """A tensor that logs the copies into it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def copy_(self, source: str, *, non_blocking: bool) -> None:
        self._log.append(f"{source} copied" + " beside" * non_blocking)


def test_a_gpu_copies_on_its_own_stream_between_what_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("copies", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("device", log))
    monkeypatch.setattr(torch.cuda, "stream", on)
    lane = recompute.lane_of(torch.device("cuda", 0))
    assert isinstance(lane, recompute.GpuLane)
    lane.wait(lane.copy("input", Copied(log)))  # type: ignore[arg-type]  # only logged
    assert log == [
        "copies waits for device",
        *("on copies", "input copied beside", "off copies"),
        "copies records",
        "device waits for event",
    ]
    assert type(recompute.lane_of(CPU)) is recompute.Lane
