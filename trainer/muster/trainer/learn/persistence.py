"""Names of a learner's tensors in published policies and in checkpoints; adapters.

A state has `model.NAME` for every weight that is trained, `optimizer.NAME.KEY` for its state in the
optimiser, and `random.RANK.SOURCE` for the generators of each process. Nothing else decides the
next step: the learning rate follows from the step's number.

An adapter is a low-rank update (LoRA; Hu et al. 2021, arXiv 2106.09685), made by peft; its tensors
have the names of peft's files. The base's weights stay as they are; next to every chosen linear
layer there are A [rank, columns] and B [rows, rank] in float32, and the layer adds B A x * alpha /
rank. A starts as in peft (uniform, like a linear layer), drawn from one generator per layer, and B
starts at zero. So the policy starts as the base, and the same recipe gives the same adapter
everywhere.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from muster.protocol.errors import ConfigError, install_hint
from muster.protocol.recipe import AdapterRecipe
from muster.trainer.learn.optimizer import MOMENTS, SmallAdamW
from muster.trainer.learn.parallel import forget_gathered, from_leader, spread

Weights = Mapping[str, Tensor]
"""A policy's parameters by name, as saved."""

_NAME = "default"
_PREFIX = "base_model.model."


def named_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and saved buffers by name; tied ones once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def by_own_names(model: Any, weights: Weights) -> Weights:
    """Return a policy's weights by the names of `named_weights`; its files may hold a tied weight
    under its other name, or under both.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    twins = {twin: name for twin, name in tied.items() if twin in weights}
    if not twins:
        return weights
    # transformers ties only what the base's files hold with equal values.
    found = {name: weights[name] for name in weights if name not in twins}
    return {name: weights[twin] for twin, name in twins.items()} | found


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Return what training changes of a model: its adapter if it has one, else all weights."""
    return adapter_weights(model) or named_weights(model)


def load_weights(model: Any, weights: Weights | None) -> None:
    """Copy weights, as `trained_weights` returns them, into a model of the same architecture.

    On all ranks of a team together; only rank 0 gives the weights, others get their shards.
    """
    _load_each(model, trained_weights(model), weights)


def _load_each(model: Any, own: Weights, weights: Weights | None) -> None:
    if weights is not None:
        weights = by_own_names(model, weights)
        _check_names(own, weights)
    with torch.no_grad():
        for name, value in own.items():
            spread(value, None if weights is None else weights[name])


def load_base(model: Any, weights: Weights | None) -> None:
    """Copy the base's weights into a model, with an adapter or without; as `load_weights`."""
    own = {
        name.replace(".base_layer.", "."): value
        for name, value in named_weights(model).items()
        if f".{_NAME}." not in name
    }
    _load_each(model, own, weights)


@contextmanager
def standing_in(model: Any, weights: Weights | None) -> Iterator[None]:
    """Compute with other weights in place of the model's own, which come back unchanged.

    Weights of the model's own type and device are used without a copy, also when mapped from a
    file; others are converted. On all ranks of a team together; only rank 0 gives the weights. A
    sharded model keeps a copy of its own shards meanwhile.
    """
    names = named_weights(model)
    if weights is not None:
        weights = by_own_names(model, weights)
        _check_names(names, weights)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    own = {name: tensors[name].data for name in names}
    is_sharded = any(isinstance(value, DTensor) for value in own.values())
    if is_sharded:
        own = {name: value.clone() for name, value in own.items()}
    with torch.no_grad():
        try:
            if is_sharded:
                load_weights(model, weights)
                forget_gathered(model)
            elif weights is not None:
                for name, value in own.items():
                    tensors[name].data = weights[name].to(value.device, value.dtype)
            yield
        finally:
            for name, value in own.items():
                if is_sharded:
                    tensors[name].copy_(value)
                else:
                    tensors[name].data = value
            forget_gathered(model)


def training_state(
    model: Any, optimizer: torch.optim.Optimizer, *, rank: int = 0
) -> dict[str, Tensor]:
    """Return all tensors that the next step depends on; live, not copies."""
    found = {f"model.{name}": value for name, value in trained_weights(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found | {f"random.{rank}.{source}": state for source, state in _random_state().items()}


def state_template(
    model: Any, optimizer: torch.optim.Optimizer, sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the tensors that a saved state of these sizes is read into: the model's and the
    optimiser's own, live, so that reading takes no second copy of them.

    Parameters without saved moments are then as before their first step. Raises ValueError, and
    changes nothing, when the state is another architecture's.
    """
    weights = trained_weights(model)
    parameters = dict(model.named_parameters())
    stepped = {name for name in parameters if f"optimizer.{name}.step" in sizes}
    own = {f"model.{name}": tuple(value.shape) for name, value in weights.items()}
    for name in stepped:
        shape = tuple(parameters[name].shape)
        own |= {f"optimizer.{name}.{moment}": shape for moment in MOMENTS}
        own[f"optimizer.{name}.step"] = ()
    given = {name: n for name, n in sizes.items() if name.startswith(("model.", "optimizer."))}
    if differing := {name for name, _ in own.items() ^ given.items()}:
        raise ValueError(f"tensors differ in {sorted(differing)[:5]}")
    found = {f"model.{name}": value for name, value in weights.items()}
    for name, parameter in parameters.items():
        if name not in stepped:
            forget_state(optimizer, parameter)
            continue
        kept = kept_state(optimizer, parameter)
        found |= {f"optimizer.{name}.{key}": value for key, value in kept.items()}
    random_ = {name: n for name, n in sizes.items() if name.startswith("random.")}
    return found | {name: torch.zeros(n, dtype=torch.uint8) for name, n in random_.items()}


def restore_state(
    model: Any, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor], *, rank: int = 0
) -> None:
    """Take over a state; raises ValueError when it is another architecture's.

    A rank without generators in the state, because there were fewer ranks, keeps its own.
    """
    sizes = {name: tuple(value.shape) for name, value in state.items()}
    with torch.no_grad():
        for name, own in state_template(model, optimizer, sizes).items():
            own.copy_(state[name])
    _restore_random(below(state, f"random.{rank}."))


def kept_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's state in an AdamW, live; it begins with zeros when there is none."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state and isinstance(optimizer, SmallAdamW):
        state |= optimizer.fresh_state(parameter)
    elif not state:
        # Only the fused step counts on the device; the others refuse a count that is there.
        place = parameter.device if optimizer.defaults["fused"] else "cpu"
        state["step"] = torch.zeros((), device=place)
        state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
    return state


def forget_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Let an AdamW be as before the parameter's first step."""
    if isinstance(optimizer, SmallAdamW):
        optimizer.forget(parameter)
    else:
        optimizer.state.pop(parameter, None)


def _check_names(own: Weights, given: Weights) -> None:
    if own.keys() != given.keys():
        raise ValueError(f"weights differ in {sorted(own.keys() ^ given.keys())[:5]}")


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _random_state() -> dict[str, Tensor]:
    """Return the states of the process's random generators, as bytes."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "python": _bytes([version, internal, gauss]),
        "numpy": _bytes([kind, np.asarray(keys).tolist(), position, has_gauss, cached]),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_random(found: Mapping[str, Tensor]) -> None:
    if not found:
        return
    torch.set_rng_state(found["torch"])
    version, internal, gauss = _value(found["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = _value(found["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


# Adapters


def add_adapter(model: Any, recipe: AdapterRecipe) -> Any:
    """Put an adapter into a model, in place, and train nothing else of it; returns the model.

    Raises ConfigError when peft is not installed or the model has none of the layers.
    """
    peft = _peft()
    _require_inner(model, recipe.target_modules)
    try:
        # Not get_peft_model: its wrapper would hide the model that all else here knows.
        peft.inject_adapter_in_model(peft_config(recipe), model, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(
            f"the adapter's target_modules {list(recipe.target_modules)} do not fit the model: "
            f"{str(error).splitlines()[0]}",
            hint="name linear layers of the model, or no target_modules to adapt all of them",
        ) from error
    # Live: copying into them changes the model.
    own = adapter_weights(model)
    for name, weight in start_of(own).items():
        own[name].copy_(weight)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{_NAME}." in name)
    _require_linear(model)
    return model


def peft_config(recipe: AdapterRecipe, base: str = "") -> Any:
    """Return peft's description of an adapter over `base`."""
    return _peft().LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=0.0,
        target_modules=list(recipe.target_modules) or "all-linear",
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's adapter by peft's names; empty when it has none."""
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): value
        for name, value in model.state_dict().items()
        if f".lora_A.{_NAME}." in name or f".lora_B.{_NAME}." in name
    }


def start_of(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter of this shape that changes nothing: version 0's."""
    return {name: _start(name, value) for name, value in adapter.items()}


def is_adapted(model: Any) -> bool:
    """Tell whether a model has an adapter."""
    return any(hasattr(module, "lora_A") for module in model.modules())


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Compute with the base's weights alone."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    _switch(layers, is_on=False)
    try:
        yield
    finally:
        _switch(layers, is_on=True)


@contextmanager
def merged_in(model: Any, weights: Weights | None) -> Iterator[None]:
    """Compute with a version's merged weights in place of base and adapter, layer by layer.

    All other weights are the base's. A layer's weight is mapped and converted while the layer
    computes, so there is no second copy of the model. On all ranks of a team together; rank 0 alone
    gives the weights, and sends each layer's to the others.
    """
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    if weights is not None and any(f"{name}.weight" not in weights for name in layers):
        raise ValueError(f"the version lacks weights of {sorted(layers)[:5]}")
    for name, layer in layers.items():
        layer.base_layer.forward = partial(_linear, layer.base_layer, weights, f"{name}.weight")
    try:
        with adapter_off(model):
            yield
    finally:
        for layer in layers.values():
            del layer.base_layer.forward


def _linear(layer: torch.nn.Linear, weights: Weights | None, name: str, value: Tensor) -> Tensor:
    # In a sharded model it is gathered, and in the compute format.
    own = layer.weight
    weight = None if weights is None else weights[name].to(own.device, own.dtype)
    return functional.linear(value, from_leader(weight, own), layer.bias)


def _require_inner(model: Any, targets: Sequence[str]) -> None:
    """Raise ConfigError when the head or the embeddings are to be adapted."""
    outer = [model.get_input_embeddings(), model.get_output_embeddings()]
    for name, module in model.named_modules():
        is_target = any(name == target or name.endswith(f".{target}") for target in targets)
        if is_target and any(module is one for one in outer):
            raise ConfigError(
                f"{name} cannot be adapted: log-probabilities are computed from its own weights",
                hint=f"remove {name} from the adapter's target_modules",
            )


def _require_linear(model: Any) -> None:
    """Raise ConfigError when an adapted layer is not a linear layer."""
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not isinstance(base, torch.nn.Linear):
            raise ConfigError(
                f"{name} is a {type(base).__name__}: only linear layers can have adapters",
                hint="train all weights of this model: set adapter.rank to 0",
            )


def _switch(layers: Sequence[Any], *, is_on: bool) -> None:
    # Not peft's own switch, which also changes whether weights are trained.
    for layer in layers:
        layer._disable_adapters = not is_on


def _start(name: str, like: Tensor) -> Tensor:
    if ".lora_B." in name:
        return torch.zeros(like.shape)
    seed = int.from_bytes(blake3(name.encode()).digest(7), "big")
    start = torch.empty(like.shape)
    torch.nn.init.kaiming_uniform_(
        start, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed)
    )
    return start.to(like.device)


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the recipe trains an adapter, and peft is not installed",
            hint=install_hint("lora"),
        ) from error
    return peft
