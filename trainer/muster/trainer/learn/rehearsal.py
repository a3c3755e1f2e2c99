"""The memory of a pass, measured with tensors that have a size and no content.

A model with few blocks is built without weights, and the trainer's own forward and backward pass
run through it; a meter adds what every operation allocates and subtracts what is freed. All blocks
of a model cost the same, and so do all tokens, so a few such passes give the peak for any number of
blocks and tokens.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from muster.protocol.recipe import AdapterRecipe
from muster.trainer.learn.attention import MASKED, NAME, switch_off_dropout
from muster.trainer.learn.cascade import has_kernel
from muster.trainer.learn.cheaper import quicken
from muster.trainer.learn.context import BatchPart
from muster.trainer.learn.logprob import block_rows, chunk_rows
from muster.trainer.learn.masked import QUERIES
from muster.trainer.learn.packing import MicroBatch, TrainingSample, pack
from muster.trainer.learn.passes import ComputeType, shorten
from muster.trainer.learn.recompute import Lane, Recompute, blocks, recompute

TOKENS = QUERIES
"""Length of the shorter rehearsed row; calls of masked attention are as large in longer ones."""
BLOCK_BUFFERS = 3
"""Float32 buffers of some rows' logits that are alive together."""
CAPPED_BUFFERS = 5
"""The same where logits are capped."""


class PassBytes(NamedTuple):
    """Bytes that a pass takes beside weights, gradients and optimiser."""

    training: float
    """At the peak of forward and backward pass, including the weights' new gradients."""
    reading: float
    """At the peak of a pass without gradient."""
    host: float = 0.0
    """Pinned on the host between forward and backward pass."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of a model's parameters."""

    parameters: int
    """All of them, tied ones once."""
    trained: int
    """Those that are trained."""
    blocks: tuple[int, ...]
    """Of each decoder block."""
    layer: int
    """Of the largest weight inside a block."""
    head: int
    """Of the head."""
    vocabulary: int
    """Rows of the head."""
    is_tied: bool
    """Whether the head is the embedding."""


class Rehearsal:
    """Passes of one architecture."""

    def __init__(
        self, config: Any, adapter: AdapterRecipe, dtype: ComputeType, device: str = "cpu"
    ) -> None:
        """`config` is the architecture as transformers describes it, `device` as torch names it."""
        self._config, self._adapter, self._dtype = config, adapter, dtype
        self._device = torch.device(device)
        self._is_packed = True
        self._total = int(config.num_hidden_layers)
        self.size = self._measure()
        try:
            self._few_blocks("none", self._few("none")[0], TOKENS, 1)
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError):
            # As in `understands_packing`: if packed attention fails in any way, rows are padded.
            self._is_packed = False

    def bytes(
        self, kind: Recompute, tokens: int, *, is_whole: bool = True, context: int = 1
    ) -> PassBytes:
        """Return the bytes of a micro-batch of `tokens` tokens in each of the `context` ranks that
        share it; the model is sharded unless `is_whole`.

        Blocks are rehearsed with a small vocabulary; what the head and the embedding add is
        computed.
        """
        layers, lengths = self._few(kind), self._lengths(tokens)
        found = [
            [self._few_blocks(kind, count, few, context) for few in lengths] for count in layers
        ]
        at = [
            [_line(lengths, [float(made[i]) for made in row], tokens) for row in found]
            for i in range(3)
        ]
        is_all = layers[0] == layers[1]
        kept, backward, reading = (
            few[0] if is_all else _line(layers, few, self._total) for few in at
        )
        own = -(-tokens // context)
        chunk, width = self._chunk(own), 4 if self._dtype == "float32" else 2
        # One process adds both gradients to the weights' own while they are made (`Passes`).
        is_added = is_whole and width == 4
        head = 0 if self._adapter.rank or is_added else self.size.head * width
        # Both gradients of a tied weight exist before they are added up.
        embedding = head * (1 + self.size.is_tied)
        if not is_whole and head:
            # Ranks sum the gradient in float32, in a copy.
            embedding = max(embedding, head + 4 * self.size.head)
        hidden = width * own * int(self._config.hidden_size)
        return PassBytes(
            max(kept + head + chunk, backward + head, embedding),
            max(reading, chunk + 2 * hidden),
            # Pinned memory comes in powers of two.
            (self._total - 1) * 2.0 ** (hidden - 1).bit_length() if kind == "host" else 0.0,
        )

    def _few(self, kind: Recompute) -> tuple[int, int]:
        """Return the two numbers of blocks to rehearse; a line through both gives the rest."""
        # If inputs wait on the host, two blocks have as many of them on the device as more blocks.
        least = 2 if kind == "host" else 1
        return (least, least + 1) if self._total > least + 1 else (self._total, self._total)

    def _lengths(self, tokens: int) -> tuple[int, int]:
        """Return the two lengths of rows to rehearse; a line through both gives `tokens`."""
        window = getattr(self._config, "sliding_window", None) or tokens
        # Only a row beyond the window needs masks.
        least = min(tokens, TOKENS + window * (tokens > window))
        return least, 2 * least

    def _measure(self) -> ModelSize:
        with FakeTensorMode():
            model = self._model(self._config)
        head = model.get_output_embeddings().weight
        return ModelSize(
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            blocks=tuple(sum(p.numel() for p in block.parameters()) for block in blocks(model)),
            layer=max(
                (p.numel() for block in blocks(model) for p in block.parameters()), default=0
            ),
            head=head.numel(),
            vocabulary=head.shape[0],
            is_tied=head is model.get_input_embeddings().weight,
        )

    def _chunk(self, tokens: int) -> float:
        """Return the bytes of the logits that exist at a time."""
        rows, width = self.size.vocabulary, 4 if self._dtype == "float32" else 2
        chunk = min(tokens, chunk_rows(rows))
        block = min(chunk, block_rows(self._device.type, rows))
        is_capped = bool(getattr(self._config, "final_logit_softcapping", None))
        buffers = CAPPED_BUFFERS if is_capped else BLOCK_BUFFERS
        return float(chunk * rows * width + buffers * block * rows * 4)

    @cache  # noqa: B019  # lives as long as a plan is made
    def _few_blocks(
        self, kind: Recompute, layers: int, tokens: int, context: int
    ) -> tuple[int, int, int]:
        """Return bytes kept after the forward pass, and at the peaks of backward and reading."""
        config = copy.deepcopy(self._config)
        config.num_hidden_layers, config.vocab_size, config.pad_token_id = layers, 8, None
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        # Real tensors are few and small here: token ids and positions.
        batch = _batch(tokens, context, is_packed=self._is_packed)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = self._model(config)
            if self._dtype != "float32":
                shorten(model, torch.bfloat16, but_trained=bool(self._adapter.rank))
            recompute(model, kind, _Nowhere(torch.device("cpu")))
            meter = _Meter()
            for parameter in model.parameters():
                meter.leave_out(parameter)
                if parameter.requires_grad:
                    self._give_gradient(parameter, meter)
            with meter:
                hidden_ND = batch.hidden(model)
                kept = meter.now + hidden_ND.nbytes
                meter.restart()
                hidden_ND.backward(torch.empty_like(hidden_ND))  # type: ignore[no-untyped-call]  # torch's stub
                backward = meter.peak
                del hidden_ND
                before = meter.now
                meter.restart()
                with torch.no_grad():
                    batch.hidden(model)
            return kept, backward, meter.peak - before

    def _give_gradient(self, parameter: Any, meter: _Meter) -> None:
        """Give a weight the gradient of an earlier micro-batch, because most have one."""
        if self._dtype == "float32" or self._adapter.rank:
            parameter.grad = torch.empty_like(parameter)
            meter.leave_out(parameter.grad)
        else:
            # It is added to the float32 weight's at once.
            parameter.register_post_accumulate_grad_hook(_forget_gradient)

    def _model(self, config: Any) -> Any:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        switch_off_dropout(model)
        if self._is_packed:
            has_kernels = has_kernel(self._device, getattr(torch, self._dtype))
            model.set_attn_implementation(NAME if has_kernels else MASKED)
        if self._adapter.rank:
            _adapt(model, self._adapter)
        quicken(model)
        return model.train()


class _Adapted(torch.nn.Module):
    """A layer that allocates as much as peft's; peft cannot work on tensors without content."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        own: Tensor = self.base(value)
        added: Tensor = self.up(self.down(value.to(self.down.weight.dtype))) * 2.0
        return (own + added).to(own.dtype)


def _adapt(model: Any, recipe: AdapterRecipe) -> None:
    """Freeze a model and put an adapter into it."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        is_target = any(name.endswith(target) for target in recipe.target_modules or ("",))
        if isinstance(layer, torch.nn.Linear) and layer is not head and is_target:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _Adapted(layer, recipe.rank))


def _line(places: tuple[int, ...], values: list[float], place: int) -> float:
    """Return the value at `place` on the line through two points."""
    slope = (values[1] - values[0]) / (places[1] - places[0])
    return values[0] + slope * (place - places[0])


class _Nowhere(Lane):
    """A lane to a host whose memory is not counted."""

    def room(self, like: Tensor) -> Tensor:
        return like.new_empty(1).expand_as(like)

    def copy(self, source: Tensor, target: Tensor) -> None:
        del source, target


class _Rehearsed:
    """Ranks that share rows, all played by this process; their tensors have no content."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0

    def gather(self, own: Tensor) -> list[Tensor]:
        return [torch.empty_like(own) for _ in range(self.size)]

    def sum_of(self, parts: list[Tensor]) -> Tensor:
        return torch.empty_like(parts[0])

    def add(self, own: Tensor) -> None:
        del own


def _batch(tokens: int, context: int, *, is_packed: bool) -> MicroBatch:
    count = 1 if is_packed else 2
    samples = [TrainingSample((0,), (0,) * (tokens // count), 0.0, 0)] * count
    (batch,) = pack(samples, 2 * tokens, is_padded=not is_packed)
    if context == 1 or not is_packed:
        return batch
    return BatchPart.of(batch, _Rehearsed(context)).batch


def _forget_gradient(parameter: Any) -> None:
    parameter.grad = None


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's stub
    """Adds up the storages that operations allocate and that are not freed yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stub
        self.now = 0
        """Bytes that are allocated now."""
        self.peak = 0
        """The largest `now` since `restart`."""
        self._known: set[int] = set()

    def restart(self) -> None:
        """Forget earlier peaks."""
        self.peak = self.now

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor's storage."""
        self._add(tensor, size=0)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return made

    def _add(self, tensor: Tensor, size: int | None = None) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known:
            return
        size = storage.nbytes() if size is None else size
        self._known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._take_off, place, size)

    def _take_off(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size
