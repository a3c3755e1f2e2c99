"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685) in a model, through peft.

The base's weights stay as they are; next to every chosen linear layer there are A [rank, columns]
and B [rows, rank] in float32, and the layer adds B A x * alpha / rank. A begins as peft begins it
(uniform as a linear layer's), drawn from a generator of its own for each layer, and B as zero, so
that the policy begins as the base, and the same recipe gives the same adapter everywhere.

What an adapter is called outside of the model is what peft calls it in its files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from muster.protocol.errors import ConfigError
from muster.protocol.recipe import AdapterRecipe

_NAME = "default"
_PREFIX = "base_model.model."


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
            hint="name linear layers of the model, or none for all of them",
        ) from error
    # Live: what is copied into them is in the model.
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


def _require_inner(model: Any, targets: Sequence[str]) -> None:
    """Raise ConfigError when the head or the embeddings are to be adapted."""
    outer = [model.get_input_embeddings(), model.get_output_embeddings()]
    for name, module in model.named_modules():
        is_target = any(name == target or name.endswith(f".{target}") for target in targets)
        if is_target and any(module is one for one in outer):
            raise ConfigError(
                f"{name} cannot be adapted: log-probabilities are computed from its own weights",
                hint="leave it out of the adapter's target_modules",
            )


def _require_linear(model: Any) -> None:
    """Raise ConfigError when an adapted layer's weight is not [rows, columns] of its output."""
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not isinstance(base, torch.nn.Linear):
            raise ConfigError(
                f"{name} is a {type(base).__name__}: adapters are over linear layers here",
                hint="train all weights of this model: adapter rank 0",
            )


def _switch(layers: Sequence[Any], *, is_on: bool) -> None:
    # Not peft's own switch: that one also says whether weights are trained.
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
            hint="pip install 'muster-rl[lora]'",
        ) from error
    return peft
