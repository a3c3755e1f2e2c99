"""Models of known families as plain arithmetic over their own weights, with few Python calls.

A step of a small model through transformers is mostly Python: modules, masks, caches. For the
families whose layers are known this computes the same with a few calls per layer, on the weights of
the transformers model itself, which stays whole and usable: `lean_rows` generates with it,
`lean_prefill` examines. `muster.inference.lean_rows.try_lean`
compares it with the model's own forward pass before anything is decoded.

Owns the layout of weights in memory, and bounds activations: work that is independent per token is
done for some tokens at a time. Axes: N tokens, H hidden units, A query and key heads, K key heads,
E head size, D kinds of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from muster.inference.layer_math import Norm, math_on
from muster.inference.products import linear

FAMILIES = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
"""Model classes of transformers whose layers are computed here."""

BLOCK_ROWS = 1 << 10
"""Tokens that go through a layer at once, except for its attention, on a CPU."""

DEVICE_BLOCK_ROWS = 1 << 14
"""The same on an accelerator."""

Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with a layer's number, queries [N, heads, E], and keys followed by values [N, 2K, E];
returns the output of attention, [N, heads * E]."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary factors of queries and keys, for N tokens, in each kind of layer."""

    cos_DN1E: tuple[torch.Tensor, ...]
    """Cosines, the same for all heads."""
    sin_DN1E: tuple[torch.Tensor, ...]
    """Sines, with the first half negated: the halves of a head are swapped before the product."""

    def at(self, places: torch.Tensor | slice) -> Rotary:
        """Return the factors of some positions."""
        return Rotary(
            tuple(cos[places] for cos in self.cos_DN1E), tuple(sin[places] for sin in self.sin_DN1E)
        )


@dataclass(frozen=True, slots=True)
class _Linear:
    """The tensors of a module: looking up its attributes costs more than a small product."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)

    def write(self, x: torch.Tensor, out_NO: torch.Tensor) -> None:
        """Write the product where it belongs; an accelerator needs no copy for that."""
        if x.device.type == "cpu":
            out_NO.copy_(self(x))
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=out_NO)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out_NO)


@dataclass(frozen=True, slots=True)
class _HeadNorms:
    """The norms of queries and of keys as one norm, whose weight has one row per head."""

    queries: Norm
    keys: Norm
    joined: Norm
    query_heads: int

    @classmethod
    def of(cls, attention: Any) -> _HeadNorms:
        """Return the norms of an attention module."""
        config, size = attention.config, attention.head_dim
        heads = config.num_attention_heads + config.num_key_value_heads
        queries, keys = _norm_of(attention.q_norm), _norm_of(attention.k_norm)
        joined = queries._replace(weight=queries.weight.new_empty(heads, size))
        return cls(queries, keys, joined, config.num_attention_heads)

    def take_weights(self) -> None:
        """Copy the present weights over the former ones, where recorded steps read them."""
        self.joined.weight[: self.query_heads] = self.queries.weight
        self.joined.weight[self.query_heads :] = self.keys.weight


@dataclass(slots=True)
class _Layer:
    kind: int
    before_attention: Norm
    qkv: _Linear
    heads: _HeadNorms | None
    output: _Linear
    after_attention: Norm | None
    before_mlp: Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    after_mlp: Norm | None
    activation: Any


class LeanModel:
    """The arithmetic of one loaded model, valid only while `is_intact`.

    Changes the layout of the weights; the model computes the same as before.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = config = model.config
        self._attention: str = config._attn_implementation
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        attention = model.model.layers[0].self_attn
        self.layers: int = config.num_hidden_layers
        self.key_heads: int = config.num_key_value_heads
        self.query_heads: int = config.num_attention_heads
        self.head_size: int = attention.head_dim
        self.scale: float = attention.scaling
        self.cap: float | None = getattr(config, "attn_logit_softcapping", None)
        """Cap of the attention scores."""
        self._head_cap: float | None = getattr(config, "final_logit_softcapping", None)
        kinds = _kinds(config)
        self._kinds = sorted(set(kinds))
        self.windows: list[int | None] = [
            config.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ]
        """Positions that each layer's queries see, their own included; None for all."""
        self._layers = [
            _lay_out(layer, self._kinds.index(kind))
            for layer, kind in zip(model.model.layers, kinds, strict=True)
        ]
        self._norm = _norm_of(model.model.norm)
        self._head = _by_columns(model.get_output_embeddings())
        embedding = model.get_input_embeddings()
        self._embedding: torch.Tensor = embedding.weight
        self._embedding_scale: torch.Tensor | None = getattr(embedding, "embed_scale", None)
        self._block_rows = BLOCK_ROWS if self.device.type == "cpu" else DEVICE_BLOCK_ROWS
        self._math = math_on(self.device, self.dtype)
        self._modules = list(model.modules())
        self._hooks = self._count_hooks()

    def is_intact(self) -> bool:
        """Return whether the model is still the loaded one, apart from the values of its weights.

        Calibration hooks modules, drops layers and sets other attention kernels: then only the
        model's own forward pass computes the changed model.
        """
        return (
            self._config.num_hidden_layers == self.layers
            and self._config._attn_implementation == self._attention
            and "forward" not in vars(self._model)
            and self._count_hooks() == self._hooks
        )

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token's keys and values."""
        return 2 * self.layers * self.key_heads * self.head_size * self.dtype.itemsize

    @property
    def pass_bytes_per_token(self) -> int:
        """Memory of one token's hidden state, queries, keys and values in a layer."""
        values = self._embedding.shape[1] + self.head_size * (self.query_heads + 2 * self.key_heads)
        return values * self.dtype.itemsize

    def empty_results(self, places: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty tensors for the hidden states and logits of so many rows."""
        like, (vocabulary, width) = self._embedding, self._head.weight.shape
        return (
            like.new_empty(places, width, dtype=self.dtype),
            like.new_empty(places, vocabulary, dtype=self.dtype),
        )

    def begin(self, length: int) -> Rotary:
        """Copy the present weights if needed; return the rotary factors of `length` positions."""
        for layer in self._layers:
            if layer.heads is not None:
                layer.heads.take_weights()
        factors = [self._factors(kind, length) for kind in self._kinds]
        return Rotary(tuple(cos for cos, _ in factors), tuple(sin for _, sin in factors))

    def _factors(self, kind: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(length, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        embed = self._model.model.rotary_emb
        # Gemma 3 rotates by other angles in layers with a window.
        arguments = (like, places, kind) if hasattr(embed, "layer_types") else (like, places)
        cos, sin = embed(*arguments)
        sin = sin[0].clone()
        sin[:, : self.head_size // 2].neg_()
        return cos[0, :, None], sin[:, None]

    def run(self, tokens_N: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        """Return the hidden states [N, H] after the final norm."""
        if len(tokens_N) > self._block_rows:
            return self._run_by_blocks(tokens_N, rotary, attend)
        x = self._embedded(tokens_N)
        for number, layer in enumerate(self._layers):
            heads = self._turned(
                layer.qkv(self._math.norm(x, layer.before_attention)), layer, rotary
            )
            x = self._after(attend(number, *self._parted(heads)), x, layer)
        return self._math.norm(x, self._norm)

    def _embedded(self, tokens_N: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens_N, self._embedding)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale.to(x.dtype)
        return x

    def _run_by_blocks(
        self, tokens_N: torch.Tensor, rotary: Rotary, attend: Attend
    ) -> torch.Tensor:
        starts = range(0, len(tokens_N), self._block_rows)
        blocks = [slice(start, start + self._block_rows) for start in starts]
        parts = [self._embedded(tokens_N[rows]) for rows in blocks]
        width = (self.query_heads + 2 * self.key_heads) * self.head_size
        heads = parts[0].new_empty(len(tokens_N), width)
        for number, layer in enumerate(self._layers):
            for rows, part in zip(blocks, parts, strict=True):
                layer.qkv.write(self._math.norm(part, layer.before_attention), heads[rows])
                self._turned(heads[rows], layer, rotary.at(rows))
            mixed = attend(number, *self._parted(self._split(heads)))
            for i, rows in enumerate(blocks):
                parts[i] = self._after(mixed[rows], parts[i], layer)
        return torch.cat([self._math.norm(part, self._norm) for part in parts])

    def _split(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.view(len(heads), -1, self.head_size)

    def _parted(self, heads_NAE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return heads_NAE[:, : self.query_heads], heads_NAE[:, self.query_heads :]

    def _turned(self, heads: torch.Tensor, layer: _Layer, rotary: Rotary) -> torch.Tensor:
        """Rotate queries and keys in place; return them with the values, [N, A + K, E]."""
        heads_NAE = self._split(heads)
        norm = None if layer.heads is None else layer.heads.joined
        cos_N1E, sin_N1E = rotary.cos_DN1E[layer.kind], rotary.sin_DN1E[layer.kind]
        self._math.turn(heads_NAE[:, : -self.key_heads], norm, cos_N1E, sin_N1E)
        return heads_NAE

    def _after(self, mixed: torch.Tensor, x: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """Return the rest of a layer, given the output of attention."""
        math, added = self._math, layer.output(mixed)
        if layer.after_attention is not None:
            added = math.norm(added, layer.after_attention)
        x, normal = math.add_norm(x, added, layer.before_mlp)
        added = layer.down(math.gated(layer.activation, layer.gate(normal), layer.up(normal)))
        return x + (added if layer.after_mlp is None else math.norm(added, layer.after_mlp))

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of hidden states, in the model's format."""
        logits = self._head(hidden_NH)
        if self._head_cap is not None:
            logits = torch.tanh(logits / self._head_cap) * self._head_cap
        return logits

    def _count_hooks(self) -> int:
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self._modules
        )


def _kinds(config: Any) -> list[str]:
    """Return which kind of attention each layer has."""
    named: list[str] | None = getattr(config, "layer_types", None)
    if named is not None:
        return list(named)
    # Mistral's layers all have the window, if there is one.
    has_window = config.model_type == "mistral" and config.sliding_window is not None
    return ["sliding_attention" if has_window else "full_attention"] * config.num_hidden_layers


def reason_against(model: Any) -> str | None:
    """Return why a model's layers are not supported here; None if they are."""
    if type(model).__name__ not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(sorted(FAMILIES))}"
    config = model.config
    kinds = _kinds(config)
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return f"layers of kinds {', '.join(sorted(set(kinds)))}"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention looks ahead"
    return None


def _lay_out(layer: Any, kind: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    # Gemma's layers have norms on both sides; one has a name that means another norm elsewhere.
    is_between = hasattr(layer, "pre_feedforward_layernorm")
    before_mlp = layer.pre_feedforward_layernorm if is_between else layer.post_attention_layernorm
    return _Layer(
        kind=kind,
        before_attention=_norm_of(layer.input_layernorm),
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        heads=_HeadNorms.of(attention) if hasattr(attention, "q_norm") else None,
        output=_by_columns(attention.o_proj),
        after_attention=_norm_of(layer.post_attention_layernorm) if is_between else None,
        before_mlp=_norm_of(before_mlp),
        gate=_by_columns(mlp.gate_proj),
        up=_by_columns(mlp.up_proj),
        down=_by_columns(mlp.down_proj),
        after_mlp=_norm_of(layer.post_feedforward_layernorm) if is_between else None,
        activation=mlp.act_fn,
    )


def _norm_of(module: Any) -> Norm:
    is_offset = type(module).__name__.startswith("Gemma")
    return Norm(module.weight, module.eps if is_offset else module.variance_epsilon, is_offset)


def _joined(modules: list[Any]) -> _Linear:
    """Return several modules as one; their weights become views of its weight."""
    sizes = [len(module.weight) for module in modules]
    weight = _stored(torch.cat([module.weight.data for module in modules]))
    for module, part in zip(modules, torch.split(weight, sizes), strict=True):
        module.weight.data = part
    if modules[0].bias is None:
        return _Linear(weight, None)
    bias = torch.cat([module.bias.data for module in modules])
    for module, part in zip(modules, torch.split(bias, sizes), strict=True):
        module.bias.data = part
    return _Linear(weight, bias)


def _by_columns(module: Any) -> _Linear:
    module.weight.data = _stored(module.weight.data)
    return _Linear(module.weight, module.bias)


def _stored(weight: torch.Tensor) -> torch.Tensor:
    """Return the same matrix, stored so that products with few rows are fast.

    A CPU's float32 products of 4 to 32 rows take half the time when the matrix is stored by
    columns; other formats and accelerators gain nothing.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return weight
    return weight.t().contiguous().t()
