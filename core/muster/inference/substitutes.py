"""Models that a cheat may run instead of the policy: changes that a `with` block makes and undoes.

Each stands for a way to save work or to skip an update: other weights (noise, quantised, trained
further), fewer layers, a rounded key-value cache, a filtered distribution. Works on any
transformers model; a change without effect on an architecture shows as a divergence of zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Substitution = Callable[[Any, int], AbstractContextManager[None]]
"""Called with a model and a seed; the model computes something else inside the block."""

WeightChange = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
"""Returns what a cheat runs instead of a weight tensor."""

_FP8_LARGEST = 448.0
_TRAINING_BATCH = 16
_TRAINING_TOKENS = 32
"""Last tokens of each sample that are trained on; every weight still gets a gradient."""
_TRAINING_LOGITS = 1 << 23
"""Most logits held at once."""
_TRAINED_AT_ONCE = 1 << 22
"""Weights that take an optimiser step together; a large model's head has forty times as many."""


def weights(change: WeightChange) -> Substitution:
    """Every weight tensor changed. The host keeps the model's own: a device may have no room for
    them.
    """

    @contextmanager
    def substitution(model: Any, seed: int) -> Iterator[None]:
        random = torch.Generator().manual_seed(seed)
        own = list[tuple[Any, torch.Tensor]]()
        try:
            with torch.no_grad():
                for weight in model.parameters():
                    own.append((weight, weight.detach().to("cpu", copy=True)))
                    weight.copy_(change(weight.detach(), random))
            yield
        finally:
            with torch.no_grad():
                for weight, kept in own:
                    weight.copy_(kept)

    return substitution


def noise(scale: float) -> Substitution:
    """Gaussian noise on every weight tensor, relative to the tensor's own spread."""

    def change(weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        drawn = torch.randn(weight.shape, generator=random).to(weight)
        return weight + scale * weight.std(correction=0) * drawn

    return weights(change)


def quantised(bits: int) -> Substitution:
    """Weights rounded to signed integers of `bits` bits, one scale per output row."""
    return weights(lambda weight, _: weight if weight.dim() < 2 else _rounded(weight, bits))


def eight_bit_floats(model: Any, seed: int) -> AbstractContextManager[None]:
    """Weights rounded to fp8 (e4m3), one scale per output row."""

    def change(weight: torch.Tensor, _random: torch.Generator) -> torch.Tensor:
        if weight.dim() < 2:
            return weight
        scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / _FP8_LARGEST
        return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale

    return weights(change)(model, seed)


def shuffled(model: Any, seed: int) -> AbstractContextManager[None]:
    """Another model of the same make: the entries of every tensor in another order."""

    def change(weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        order = torch.randperm(weight.numel(), generator=random).to(weight.device)
        return weight.flatten()[order].view_as(weight)

    return weights(change)(model, seed)


def trained(samples: Sequence[Sequence[int]], steps: int, learning_rate: float) -> Substitution:
    """A neighbour version: optimiser steps of a policy gradient with random advantages.

    Adam on a float32 copy, rounded to the model's format, as a trainer publishes. Each sample is a
    prompt and its completion in one sequence. Gradients, copy and moments are on the host, with
    several steps 14 bytes a weight besides the model's own.
    """

    @contextmanager
    def substitution(model: Any, seed: int) -> Iterator[None]:
        with weights(lambda weight, _random: weight)(model, seed):
            _train(model, samples, steps, learning_rate, seed)
            yield

    return substitution


@contextmanager
def first_layers(model: Any, _seed: int) -> Iterator[None]:
    """A model four times smaller: only the first quarter of the layers runs."""
    config = model.config.get_text_config()
    own = config.num_hidden_layers
    config.num_hidden_layers = max(1, own // 4)
    try:
        yield
    finally:
        config.num_hidden_layers = own


def rounded_cache(bits: int) -> Substitution:
    """Keys and values rounded to integers of `bits` bits, one scale per token."""

    @contextmanager
    def substitution(model: Any, _seed: int) -> Iterator[None]:
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, output: _rounded(output, bits))
            for name, module in model.named_modules()
            if name.endswith(("k_proj", "v_proj"))
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    return substitution


def without_unlikely(share: float) -> Substitution:
    """Tokens less likely than `share` are never chosen."""

    @contextmanager
    def substitution(model: Any, _seed: int) -> Iterator[None]:
        def filtered(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
            is_unlikely = logits.float().softmax(dim=-1) < share
            # The likeliest token stays, even if all are unlikely.
            is_unlikely.scatter_(-1, logits.argmax(dim=-1, keepdim=True), False)
            return logits.masked_fill(is_unlikely, torch.finfo(logits.dtype).min)

        hook = model.get_output_embeddings().register_forward_hook(filtered)
        try:
            yield
        finally:
            hook.remove()

    return substitution


def both(first: Substitution, second: Substitution) -> Substitution:
    """Two substitutions at once."""

    @contextmanager
    def substitution(model: Any, seed: int) -> Iterator[None]:
        with first(model, seed), second(model, seed):
            yield

    return substitution


def _rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    scale = tensor.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    rounded: torch.Tensor = (tensor / scale).round() * scale
    return rounded


def _train(
    model: Any, samples: Sequence[Sequence[int]], steps: int, learning_rate: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    live = list(model.parameters())
    shortest = min(_TRAINING_TOKENS, *(len(sample) for sample in samples))
    tokens = torch.tensor([list(sample[-shortest:]) for sample in samples], device=live[0].device)
    optimizers: list[dict[int, torch.optim.Adam]] = [{} for _ in live]
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    hooks = []
    try:
        for weight in live:
            weight.requires_grad_(True)
            hooks.append(weight.register_post_accumulate_grad_hook(_taking_off(gradients)))
        for step in range(steps):
            rows = torch.randint(len(tokens), (_TRAINING_BATCH,), generator=random)
            advantages = torch.randint(0, 2, (_TRAINING_BATCH,), generator=random) * 2.0 - 1
            _add_gradient(model, tokens[rows], advantages)
            for weight, own in zip(live, optimizers, strict=True):
                if (gradient := gradients.pop(weight, None)) is not None:
                    _descend(weight, gradient, own, learning_rate, is_last=step == steps - 1)
    finally:
        for hook in hooks:
            hook.remove()
        for weight in live:
            weight.requires_grad_(False)
            weight.grad = None


def _taking_off(gradients: dict[torch.Tensor, torch.Tensor]) -> Callable[[Any], None]:
    """Return a hook that moves a weight's gradient to the host, and adds it to what is there."""

    def take_off(weight: Any) -> None:
        moved, weight.grad = weight.grad.to("cpu"), None
        kept = gradients.setdefault(weight, moved)
        if kept is not moved:
            kept += moved

    return take_off


def _add_gradient(model: Any, tokens_BT: torch.Tensor, advantages_B: torch.Tensor) -> None:
    """Add the gradient of a batch, some rows at a time, because logits take much memory."""
    width = tokens_BT.shape[1] * model.get_output_embeddings().weight.shape[0]
    count = max(1, _TRAINING_LOGITS // width)
    for start in range(0, len(tokens_BT), count):
        tokens, advantages = (each[start : start + count] for each in (tokens_BT, advantages_B))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        logprobs = logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(advantages.to(logprobs)[:, None] * logprobs).mean()
        (loss * len(tokens) / len(tokens_BT)).backward()


def _descend(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    optimizers: dict[int, torch.optim.Adam],
    learning_rate: float,
    *,
    is_last: bool,
) -> None:
    """Take an optimiser step of one tensor, some rows at a time. A row's float32 copy and moments
    are kept in `optimizers`, by the first of the rows, only if there is a next step.
    """
    count = max(1, _TRAINED_AT_ONCE * len(weight) // weight.numel())
    for start in range(0, len(weight), count):
        rows = weight.detach()[start : start + count]
        optimizer = optimizers.pop(start, None)
        if optimizer is None:
            optimizer = torch.optim.Adam(
                [rows.to("cpu", torch.float32, copy=True)], lr=learning_rate
            )
        if not is_last:
            optimizers[start] = optimizer
        (master,) = optimizer.param_groups[0]["params"]
        master.grad = gradient[start : start + count].float()
        optimizer.step()
        master.grad = None
        rows.copy_(master)
