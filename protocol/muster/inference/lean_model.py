"""Llama-like models as plain arithmetic over their own weights: decoding without layers of calls.

A step of a small model through transformers is mostly Python: modules, masks, caches. For the
families whose layers are known this computes the same with a few calls per layer, on the weights of
the transformers model itself, which stays whole and usable. `muster.inference.probing` compares it
with the model's own forward pass before anything is decoded.

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

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with a layer's number, queries [N, heads, E], keys and values [N, K, E]; returns what
attention yields, [N, heads * E]."""


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


@dataclass(slots=True)
class _Layer:
    attention: Any
    mlp: Any
    norms: tuple[Any, Any]
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
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
        _store_columns(model.get_output_embeddings())
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
            if hasattr(layer.attention, "q_norm"):
                q, k = layer.attention.q_norm.weight, layer.attention.k_norm.weight
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
        x = F.embedding(tokens_N, self._model.model.embed_tokens.weight)
        for number, layer in enumerate(self._layers):
            qkv = F.linear(_norm(x, layer.norms[0]), layer.qkv, layer.qkv_bias)
            heads = qkv.view(len(x), -1, self.head_size)
            turned = self._turn(heads[:, : -self.key_heads], layer, rotary)
            queries, keys = turned[:, : self.query_heads], turned[:, self.query_heads :]
            values = heads[:, -self.key_heads :]
            output = layer.attention.o_proj
            mixed = F.linear(attend(number, queries, keys, values), output.weight, output.bias)
            x = x + mixed
            x = x + _mlp(_norm(x, layer.norms[1]), layer.mlp)
        return _norm(x, self._model.model.norm)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits [N, V] of hidden states."""
        head = self._model.lm_head
        return F.linear(hidden_NH, head.weight, head.bias).float()

    def _turn(self, heads: torch.Tensor, layer: _Layer, rotary: Rotary) -> torch.Tensor:
        """Return queries and keys [N, A, E], normalised where the family does so, and rotated."""
        if layer.head_norm_AE is not None:
            eps = layer.attention.q_norm.variance_epsilon
            normal = F.rms_norm(heads.float(), (self.head_size,), None, eps)
            heads = layer.head_norm_AE * normal.to(heads.dtype)
        swapped = heads.roll(self.head_size // 2, dims=-1)
        return heads * rotary.cos_N1E + swapped * rotary.sin_N1E

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


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """Root-mean-square norm with transformers' order of roundings."""
    weight, eps = norm.weight, norm.variance_epsilon
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    normal = F.rms_norm(x.float(), weight.shape, None, eps)
    scaled: torch.Tensor = weight * normal.to(x.dtype)
    return scaled


def _mlp(x: torch.Tensor, mlp: Any) -> torch.Tensor:
    gate = mlp.act_fn(F.linear(x, mlp.gate_proj.weight, mlp.gate_proj.bias))
    up = F.linear(x, mlp.up_proj.weight, mlp.up_proj.bias)
    return F.linear(gate * up, mlp.down_proj.weight, mlp.down_proj.bias)


def _lay_out(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
    for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        _store_columns(linear)
    return _Layer(
        attention, mlp, (layer.input_layernorm, layer.post_attention_layernorm), qkv, bias
    )


def _join(linears: list[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weights of several layers as one; theirs become views of it."""
    sizes = [len(linear.weight) for linear in linears]
    weight = _by_columns(torch.cat([linear.weight.data for linear in linears]))
    for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight.data = part
    if linears[0].bias is None:
        return weight, None
    bias = torch.cat([linear.bias.data for linear in linears])
    for linear, part in zip(linears, torch.split(bias, sizes), strict=True):
        linear.bias.data = part
    return weight, bias


def _store_columns(linear: Any) -> None:
    linear.weight.data = _by_columns(linear.weight.data)


def _by_columns(weight: torch.Tensor) -> torch.Tensor:
    """Return the same matrix, stored so that products with few rows are fast.

    A CPU's float32 products of 4 to 32 rows take half the time when the matrix is stored by
    columns; other formats and accelerators gain nothing.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return weight
    return weight.t().contiguous().t()
