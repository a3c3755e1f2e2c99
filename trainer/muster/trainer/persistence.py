"""What a learner's tensors are called, outside of it: in published policies and in checkpoints.

A state has `model.NAME` for every weight that is trained, `optimizer.NAME.KEY` for what the
optimiser keeps of it, and `random.RANK.SOURCE` for the generators of each process. Nothing else
decides the next step: the learning rate follows from the step's number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muster.trainer.adapter import adapter_weights
from muster.trainer.parallel import spread

Weights = Mapping[str, Tensor]
"""A policy's parameters by name, as saved."""


def named_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and saved buffers by name; tied ones once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Return what training changes of a model: its adapter if it has one, else all weights."""
    return adapter_weights(model) or named_weights(model)


def load_weights(model: Any, weights: Weights | None) -> None:
    """Copy weights, as `trained_weights` returns them, into a model of the same architecture.

    On all ranks of a team together; only rank 0 gives the weights, others get their shards.
    """
    own = trained_weights(model)
    if weights is not None:
        _check_names(own, weights)
    with torch.no_grad():
        for name, value in own.items():
            spread(value, None if weights is None else weights[name])


def training_state(
    model: Any, optimizer: torch.optim.Optimizer, *, rank: int = 0
) -> dict[str, Tensor]:
    """Return all that the next step depends on; the tensors are live."""
    found = {f"model.{name}": value for name, value in trained_weights(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = value
    return found | {f"random.{rank}.{source}": state for source, state in _random_state().items()}


def state_template(model: Any, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return new tensors for a saved state of these sizes, sharded like the model's own."""
    weights, parameters = trained_weights(model), dict(model.named_parameters())
    made: dict[str, Tensor] = {}
    for name, size in sizes.items():
        kind, _, rest = name.partition(".")
        if kind == "random":
            made[name] = torch.zeros(size, dtype=torch.uint8)
            continue
        own = weights.get(rest) if kind == "model" else parameters.get(rest.rpartition(".")[0])
        fits = own is not None and tuple(own.shape) == size
        made[name] = torch.zeros_like(own) if own is not None and fits else torch.zeros(size)
    return made


def restore_state(
    model: Any, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor], *, rank: int = 0
) -> None:
    """Take over a state; raises ValueError when it is another architecture's.

    A rank that the state does not know, because there were fewer, keeps its own generators.
    """
    own_weights, saved = trained_weights(model), _below(state, "model.")
    _check_names(own_weights, saved)
    with torch.no_grad():
        for name, value in own_weights.items():
            value.copy_(saved[name])
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        own = _below(state, f"optimizer.{name}.")
        # The names of one parameter may begin with another's.
        own = {key: value.detach().clone() for key, value in own.items() if "." not in key}
        if own:
            optimizer.state[parameter] = own
    _restore_random(_below(state, f"random.{rank}."))


def _check_names(own: Weights, given: Weights) -> None:
    if own.keys() != given.keys():
        raise ValueError(f"weights differ in {sorted(own.keys() ^ given.keys())[:5]}")


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _random_state() -> dict[str, Tensor]:
    """Return the states of the process's generators, as bytes."""
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
