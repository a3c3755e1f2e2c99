"""Substitutions change a model's results, and can be undone."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from muster.inference import substitutes
from muster.inference.substitutes import Substitution
from muster.inference.transformers_engine import TransformersEngine

SAMPLES = [(1, 2, 3, 4, 17, 1, 2, 3, 4), (4, 3, 2, 1, 17, 1, 2, 3, 4)] * 8
ALL: dict[str, Substitution] = {
    "noise": substitutes.noise(0.1),
    "int4": substitutes.quantised(4),
    "fp8": substitutes.eight_bit_floats,
    "shuffled": substitutes.shuffled,
    "trained": substitutes.trained(SAMPLES, 2, 1e-3),
    "first layers": substitutes.first_layers,
    "rounded cache": substitutes.rounded_cache(4),
    "without unlikely": substitutes.without_unlikely(0.2),
    "both": substitutes.both(substitutes.rounded_cache(4), substitutes.without_unlikely(0.2)),
}


def logits(engine: TransformersEngine) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return engine.recompute([((1, 2, 3, 4, 10), (1, 2, 3, 4))])[0].logits_TV


@pytest.mark.parametrize("name", ALL)
def test_model_computes_something_else_inside_and_the_same_after(
    engine: TransformersEngine, name: str
) -> None:
    before = logits(engine)
    with ALL[name](engine.model, 0):
        inside = logits(engine)
    assert np.abs(inside - before).max() > 1e-4
    assert (logits(engine) == before).all()


@pytest.mark.parametrize("name", ALL)
def test_model_is_restored_when_the_body_fails(engine: TransformersEngine, name: str) -> None:
    before = logits(engine)
    with pytest.raises(KeyError), ALL[name](engine.model, 0):
        raise KeyError
    assert (logits(engine) == before).all()
    assert not any(weight.requires_grad for weight in engine.model.parameters())


def test_more_training_leads_further_away(engine: TransformersEngine) -> None:
    before, moved = logits(engine), []
    for steps in (1, 4):
        with substitutes.trained(SAMPLES, steps, 1e-3)(engine.model, 0):
            moved.append(float(np.abs(logits(engine) - before).max()))
    assert moved[0] < moved[1]


def test_training_moves_weights_by_the_learning_rate(engine: TransformersEngine) -> None:
    before = engine.model.get_output_embeddings().weight.clone()
    with substitutes.trained(SAMPLES, 1, 1e-3)(engine.model, 0):
        moved = (engine.model.get_output_embeddings().weight - before).abs()
    assert float(moved.max()) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_that_are_trained_in_parts_move_alike(
    engine: TransformersEngine, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, moved = substitutes.trained(SAMPLES, steps, 1e-3), []
    for most in (1 << 24, 100):
        monkeypatch.setattr(substitutes, "_TRAINED_AT_ONCE", most)
        with change(engine.model, 0):
            moved.append([weight.clone() for weight in engine.model.parameters()])
    for whole, in_parts in zip(*moved, strict=True):
        torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=0)


HOST = torch.device("cpu")
SHORT = [(1, 2), (3, 4)]
"""Their activations are few beside the weights."""


class DeviceBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's stub
    """Lets torch's device `meta`, whose tensors have no content, stand for a GPU; counts the bytes
    of the tensors on it that are alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stub
        self.alive = WeakValueDictionary[int, torch.UntypedStorage]()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return True  # transformers asks whether positions are in one piece
        is_fetched = func is torch.ops.aten._to_copy.default and options.get("device") == HOST
        made = torch.zeros_like(*args, **options) if is_fetched else func(*args, **options)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = storage
        self.peak = max(self.peak, sum(each.nbytes() for each in self.alive.values()))
        return made


@pytest.mark.parametrize(
    "change",
    [substitutes.quantised(4), substitutes.noise(0.1), substitutes.trained(SHORT, 2, 1e-3)],
)
def test_a_cheat_needs_no_second_model_on_the_device(change: Substitution) -> None:
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).bfloat16().requires_grad_(False)
    weights = sum(weight.nbytes for weight in model.parameters())
    with DeviceBytes() as device, change(model, 0):
        pass
    assert weights < device.peak < 1.5 * weights


def test_quarter_of_the_layers_is_at_least_one(engine: TransformersEngine) -> None:
    layers = engine.model.config.num_hidden_layers
    with substitutes.first_layers(engine.model, 0):
        assert engine.model.config.num_hidden_layers == 1
    assert engine.model.config.num_hidden_layers == layers


def test_unlikely_tokens_are_ruled_out_and_the_likeliest_stays(engine: TransformersEngine) -> None:
    before = torch.from_numpy(logits(engine)).softmax(dim=1)
    with substitutes.without_unlikely(0.3)(engine.model, 0):
        after = torch.from_numpy(logits(engine)).softmax(dim=1)
    kept = before >= 0.3
    assert (after[~kept & (before < before.max(dim=1, keepdim=True).values)] == 0).all()
    assert (after.argmax(dim=1) == before.argmax(dim=1)).all()


def changed(weight: torch.Tensor, change: Substitution) -> torch.Tensor:
    model = torch.nn.ParameterList([torch.nn.Parameter(weight)])
    with change(model, 0):
        return model[0].detach().clone()


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 255)])
def test_quantised_weights_take_few_values(bits: int, levels: int) -> None:
    weight = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    rounded = changed(weight, substitutes.quantised(bits))
    assert 4 < len(rounded.unique()) <= levels
    assert rounded.abs().max() == pytest.approx(weight.abs().max())


@pytest.mark.parametrize("change", [substitutes.quantised(4), substitutes.eight_bit_floats])
def test_vectors_of_norms_are_not_quantised(change: Substitution) -> None:
    norm = torch.linspace(0.5, 1.5, 10)
    assert torch.equal(changed(norm.clone(), change), norm)


def test_eight_bit_floats_are_within_a_sixteenth() -> None:
    weight = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    error = (changed(weight.clone(), substitutes.eight_bit_floats) - weight).abs()
    assert float((error / weight.abs()).quantile(0.9)) <= 1 / 16


def test_substitutions_are_context_managers_of_nothing(engine: TransformersEngine) -> None:
    manager: AbstractContextManager[None] = substitutes.first_layers(engine.model, 0)
    with manager as nothing:
        assert nothing is None
