"""Forward passes over samples: of the policy in training, of those that sampled, of the base.

Owns how samples are packed, which number format computes, and the second model that earlier
policies take turns in. Knows no loss and no optimiser.

The optimiser's weights stay in float32. With a shorter compute format, forward and backward passes
run on a copy, which is made from them once per optimiser step; each gradient is added to the
float32 weight's gradient as soon as the backward pass has it, so micro-batches add up without loss.

Axes: N completion tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.attention import NAME, switch_off_dropout, understands_packing
from muster.trainer.learn.logprob import Objective, head_of, token_logprobs, token_objective
from muster.trainer.learn.packing import MicroBatch, Sample, pack
from muster.trainer.learn.persistence import (
    Weights,
    adapter_off,
    is_adapted,
    load_weights,
    named_weights,
)

logger = logging.getLogger(__name__)

BASE = PolicyVersion(0)
"""The reference policy of the KL term."""


ComputeType = Literal["float32", "bfloat16"]
"""Number formats that forward and backward passes can run in."""


class Passes:
    """Computes log-probabilities of samples under the policies of a step."""

    def __init__(
        self,
        trained: Any,
        frozen: Any,
        published: Callable[[PolicyVersion], Weights | None],
        *,
        temperature: float,
        micro_batch_tokens: int,
        compute_dtype: ComputeType = "float32",
        is_packed: bool | None = None,
    ) -> None:
        """`frozen` is a model like `trained`; published versions' weights are put into it.
        `is_packed` says whether samples may share rows; none to find out, which takes weights.
        """
        for model in (trained, frozen):
            switch_off_dropout(model)
        self.is_packed = understands_packing(trained) if is_packed is None else is_packed
        if self.is_packed:
            for model in (trained, frozen):
                model.set_attn_implementation(NAME)
        logger.info("samples share rows" if self.is_packed else "samples are padded to rows")
        self._computing = ComputeCopy(trained, compute_dtype)
        self._frozen = shorten(frozen, getattr(torch, compute_dtype)).eval().requires_grad_(False)
        self._published = published
        self._loaded: PolicyVersion | None = None
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens

    def pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Return the micro-batches of some samples."""
        return pack(samples, self._micro_batch_tokens, is_padded=not self.is_packed)

    def refresh(self) -> None:
        """Compute with the trained weights as they are now; due after every change of them."""
        self._computing.refresh()

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [N] of a micro-batch's tokens, with their gradient.

        For losses that need all tokens before any has its slope.
        """
        return self._values(self._computing.model, batch)

    def objective(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of a loss over tokens with gradient, and log-probability and entropy [N]
        without; `objective` as `muster.trainer.learn.logprob.token_objective` takes it.
        """
        model = self._computing.model
        hidden_ND = batch.hidden(model)
        targets_N = batch.targets_N.to(hidden_ND.device)
        return token_objective(hidden_ND, head_of(model), targets_N, self._temperature, objective)

    def accompany(self, batch: MicroBatch) -> None:
        """Compute a pass and a gradient of zero: a filler, that others do not compute alone."""
        logp_N, _ = self.logprobs(batch)
        (logp_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]  # torch's stub

    @torch.no_grad()
    def behaviour(
        self, samples: Sequence[Sample], batches: Sequence[MicroBatch]
    ) -> list[Tensor | None]:
        """Return each token's log-probability under the policy version that sampled it.

        None for a micro-batch whose policies have the weights that compute now, bit for bit: there
        the pass that makes the gradient gives these values too.
        """
        found: list[Tensor | None] = [None] * len(samples)
        for version in self._versions(samples):
            if not self._is_current(PolicyVersion(version)):
                self._freeze(PolicyVersion(version))
                mine = [i for i, s in enumerate(samples) if s.policy_version == version]
                self._fill(found, mine, samples)
        return [self._joined(batch, [found[i] for i in batch.order]) for batch in batches]

    @torch.no_grad()
    def surprise(self, samples: Sequence[Sample]) -> list[float]:
        """Return per sample the mean over its tokens of -log p - entropy, in nats, under the policy
        version that sampled it: 0 in expectation if that version did; nan where p is no number.
        """
        found = [math.nan] * len(samples)
        for version in self._versions(samples):
            self._freeze(PolicyVersion(version))
            mine = [i for i, s in enumerate(samples) if s.policy_version == version]
            for batch in self.pack([samples[i] for i in mine]):
                logp_N, entropy_N = self._values(self._frozen, batch)
                if not batch.order:
                    continue
                parts = torch.split(-(logp_N + entropy_N), batch.row_N.bincount().tolist())
                for place, excess in zip(batch.order, parts, strict=True):
                    found[mine[place]] = float(excess.mean())
        return found

    @torch.no_grad()
    def current(self, batch: MicroBatch) -> Tensor:
        """Return each token's log-probability [N] under the policy in training as it is now."""
        return self._values(self._computing.model, batch)[0]

    @torch.no_grad()
    def reference(self, batch: MicroBatch) -> Tensor:
        """Return each token's log-probability [N] under the base model."""
        model = self._computing.model
        if is_adapted(model):
            with adapter_off(model):
                return self._values(model, batch)[0]
        self._freeze(BASE)
        return self._values(self._frozen, batch)[0]

    def _versions(self, samples: Sequence[Sample]) -> list[int]:
        """Return the policy versions that passes over samples need, in order."""
        return sorted({sample.policy_version for sample in samples})

    def _fill(
        self, found: list[Tensor | None], chosen: list[int], samples: Sequence[Sample]
    ) -> None:
        """Put the loaded policy's log-probabilities of the chosen samples into `found`."""
        for batch in self.pack([samples[i] for i in chosen]):
            lengths = batch.row_N.bincount().tolist()
            parts = torch.split(self._values(self._frozen, batch)[0], lengths)
            for place, logp in zip(batch.order, parts, strict=True):
                found[chosen[place]] = logp

    def _joined(self, batch: MicroBatch, parts: Sequence[Tensor | None]) -> Tensor | None:
        known = [part for part in parts if part is not None]
        if not known:
            return None
        if len(known) == len(parts):
            return torch.cat(known)
        own = torch.split(self.current(batch), batch.row_N.bincount().tolist())
        return torch.cat([o if p is None else p for o, p in zip(own, parts, strict=True)])

    def _freeze(self, version: PolicyVersion) -> None:
        if self._loaded != version:
            self._loaded = None
            load_weights(self._frozen, self._published(version))
            self._loaded = version

    def _is_current(self, version: PolicyVersion) -> bool:
        """Tell whether a version has the weights that compute now, in the compute format."""
        # What an adapter computes beside its base differs from the merged weights by rounding.
        if is_adapted(self._computing.model):
            return False
        own, weights = named_weights(self._computing.model), self._published(version)
        return (
            weights is not None
            and own.keys() == weights.keys()
            and all(
                torch.equal(weights[name].to(value.device, value.dtype), value)
                for name, value in own.items()
            )
        )

    def _values(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        hidden_ND = batch.hidden(model)
        targets_N = batch.targets_N.to(hidden_ND.device)
        return token_logprobs(hidden_ND, head_of(model), targets_N, self._temperature)


class ComputeCopy:
    """The model that computes for the one whose weights are trained."""

    def __init__(self, trained: Any, dtype: ComputeType) -> None:
        """With float32 the trained model computes itself. So does one with an adapter: what is not
        trained of it is shortened, and needs no copy.
        """
        self._trained = trained
        self.model = trained
        if dtype == "float32":
            return
        if is_adapted(trained):
            shorten(trained, getattr(torch, dtype), but_trained=True)
        else:
            self.model = _twin(trained, getattr(torch, dtype))

    def refresh(self) -> None:
        """Take over the trained weights; due before the first micro-batch of an optimiser step."""
        if self.model is self._trained:
            return
        with torch.no_grad():
            pairs = zip(self.model.parameters(), self._trained.parameters(), strict=True)
            for own, trained in pairs:
                own.copy_(trained)


def shorten(model: Any, dtype: torch.dtype, *, but_trained: bool = False) -> Any:
    """Return the model with its parameters in another format, perhaps those alone that are not
    trained; its buffers keep theirs.
    """
    for parameter in model.parameters():
        if not (but_trained and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)
    return model


def _twin(trained: Any, dtype: torch.dtype) -> Any:
    twin = shorten(copy.deepcopy(trained), dtype)
    for own, master in zip(twin.parameters(), trained.parameters(), strict=True):
        if own.requires_grad:
            own.register_post_accumulate_grad_hook(partial(_hand_over, master=master))
    return twin


def _hand_over(own: Tensor, *, master: Tensor) -> None:
    assert own.grad is not None
    if master.grad is None:
        master.grad = own.grad.to(master.dtype)
    else:
        master.grad += own.grad
    own.grad = None
