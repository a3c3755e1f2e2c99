"""Llama-like models as plain arithmetic over their own weights: decoding without layers of calls.

A step of a small model through transformers is mostly Python: modules, masks, caches. For the
families whose layers are known this computes the same with a few calls per layer, on the weights of
the transformers model itself, which stays whole and usable. `muster.inference.lean_rows` compares
it with the model's own forward pass before anything is decoded.

Owns how weights lie in memory. Axes: N tokens, H hidden units, A query and key heads, K key heads,
E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FAMILIES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Model classes of transformers whose layers are computed here."""

_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles do not depend on the length of what is computed."""

Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with a layer's number, queries [N, heads, E], and keys followed by values [N, 2K, E];
returns what attention yields, [N, heads * E]."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """What positions multiply queries and keys by, for N tokens."""

    cos_N1E: torch.Tensor
    """Cosines, the same for all heads."""
    sin_N1E: torch.Tensor
    """Sines, those of the first half negated: for entries that swapped halves."""

    def at(self, places: torch.Tensor) -> Rotary:
        """Return those of some positions."""
        return Rotary(self.cos_N1E[places], self.sin_N1E[places])


@dataclass(frozen=True, slots=True)
class _Linear:
    """The tensors of a module, whose attributes cost more to find than a small product."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm with transformers' order of roundings."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normal = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normal.to(x.dtype)


@dataclass(slots=True)
class _Layer:
    before_attention: _Norm
    qkv: _Linear
    heads: tuple[_Norm, _Norm] | None
    output: _Linear
    before_mlp: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    activation: Any
    head_norm_AE: torch.Tensor | None = None


class LeanModel:
    """The arithmetic of one loaded model, meant only while `is_intact`.

    Lays the weights out anew; the model computes the same as before.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = model.config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        attention = model.model.layers[0].self_attn
        self.layers: int = model.config.num_hidden_layers
        self.key_heads: int = model.config.num_key_value_heads
        self.query_heads: int = model.config.num_attention_heads
        self.head_size: int = attention.head_dim
        self.scale: float = attention.scaling
        self._layers = [_lay_out(layer) for layer in model.model.layers]
        self._norm = _norm_of(model.model.norm)
        self._head = _by_columns(model.get_output_embeddings())
        self._embedding: torch.Tensor = model.get_input_embeddings().weight
        self._hooks = self._count_hooks()

    def is_intact(self) -> bool:
        """Return whether the model still is what was loaded, but for the values of its weights.

        Calibration hooks modules, drops layers and asks for other attention kernels: then only the
        model's own forward pass computes what was meant.
        """
        return (
            self._config.num_hidden_layers == self.layers
            and self._config._attn_implementation == "sdpa"
            and "forward" not in vars(self._model)
            and self._count_hooks() == self._hooks
        )

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token's keys and values."""
        return 2 * self.layers * self.key_heads * self.head_size * self.dtype.itemsize

    def begin(self, length: int) -> Rotary:
        """Take the present weights, and return the rotary factors of `length` positions."""
        for layer in self._layers:
            if layer.heads is not None:
                q, k = (norm.weight for norm in layer.heads)
                layer.head_norm_AE = torch.cat(
                    [q.expand(self.query_heads, -1), k.expand(self.key_heads, -1)]
                )
        places = torch.arange(length, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._model.model.rotary_emb(like, places)
        sin = sin[0].clone()
        sin[:, : self.head_size // 2].neg_()
        return Rotary(cos[0, :, None], sin[:, None])

    def run(self, tokens_N: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        """Return the hidden states [N, H] after the final norm."""
        x = F.embedding(tokens_N, self._embedding)
        for number, layer in enumerate(self._layers):
            heads = layer.qkv(layer.before_attention(x)).view(len(x), -1, self.head_size)
            self._turn(heads[:, : -self.key_heads], layer, rotary)
            queries, keys_values = heads[:, : self.query_heads], heads[:, self.query_heads :]
            x = x + layer.output(attend(number, queries, keys_values))
            normal = layer.before_mlp(x)
            x = x + layer.down(layer.activation(layer.gate(normal)) * layer.up(normal))
        return self._norm(x)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits [N, V] of hidden states."""
        return self._head(hidden_NH).float()

    def _turn(self, heads_NAE: torch.Tensor, layer: _Layer, rotary: Rotary) -> None:
        """Normalise queries and keys where the family does so, and rotate them, in place."""
        heads = heads_NAE
        if layer.head_norm_AE is not None and layer.heads is not None:
            normal = F.rms_norm(heads.float(), (self.head_size,), None, layer.heads[0].eps)
            heads = layer.head_norm_AE * normal.to(heads.dtype)
        swapped = heads.roll(self.head_size // 2, dims=-1)
        torch.add(heads * rotary.cos_N1E, swapped * rotary.sin_N1E, out=heads_NAE)

    def _count_hooks(self) -> int:
        return sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in self._model.modules()
        )


def reason_against(model: Any) -> str | None:
    """Return why a model's layers are not known here; None where they are."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windows = set(getattr(config, "layer_types", None) or ["full_attention"])
    if type(model).__name__ not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(sorted(FAMILIES))}"
    if windows != {"full_attention"} or (
        type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None
    ):
        return "some layers see a window only"
    if rope not in _ROPES:
        return f"rotary embeddings of type {rope}"
    return None


def _lay_out(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = hasattr(attention, "q_norm")
    return _Layer(
        before_attention=_norm_of(layer.input_layernorm),
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        heads=(_norm_of(attention.q_norm), _norm_of(attention.k_norm)) if has_head_norms else None,
        output=_by_columns(attention.o_proj),
        before_mlp=_norm_of(layer.post_attention_layernorm),
        gate=_by_columns(mlp.gate_proj),
        up=_by_columns(mlp.up_proj),
        down=_by_columns(mlp.down_proj),
        activation=mlp.act_fn,
    )


def _norm_of(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


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
