"""Forward passes over samples: of the policy in training, the policies that sampled, and the base.

Owns how samples are packed, which number format computes, and when earlier policies are read: all
values that a training step needs of them are computed before its first optimiser step, version by
version, while their weights replace those of the model in training. Knows no loss and no optimiser.

The optimiser's weights stay in float32. With a shorter compute format, forward and backward passes
run on a copy, which is made from them once per optimiser step; each gradient is added to the
float32 weight's gradient as soon as the backward pass has it, so micro-batches add up without loss.

Axes: N completion tokens of a micro-batch.
"""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.attention import fastest, switch_off_dropout, understands_packing
from muster.trainer.learn.cheaper import add_rows_at_once, narrow, quicken
from muster.trainer.learn.logprob import (
    Head,
    Objective,
    head_of,
    token_logprobs,
    token_objective,
)
from muster.trainer.learn.packing import MicroBatch, TrainingSample, pack
from muster.trainer.learn.persistence import (
    Weights,
    adapter_off,
    by_own_names,
    is_adapted,
    merged_in,
    named_weights,
    standing_in,
)
from muster.trainer.learn.recompute import Recompute, recompute
from muster.trainer.measure.throughput import cost_of

logger = logging.getLogger(__name__)

FILLER = TrainingSample((0,), (0, 0), 0.0, 0)
"""The sample of a pass whose values nobody trains on."""
BASE = PolicyVersion(0)
"""The reference policy of the KL term."""


ComputeType = Literal["float32", "bfloat16"]
"""Number formats that forward and backward passes can run in."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which model configurations give the number of experts."""


def require_dense(config: Any) -> None:
    """Raise ConfigError for a mixture of experts; `config` is as transformers describes it.

    Rounding can change the experts of a token, so another engine, number format or batch may
    compute it with other weights: the ratio of two policies would then compare two models.
    """
    for name in EXPERTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 1:
            raise ConfigError(
                f"{config.model_type} is a mixture of {count} experts, and the experts that the "
                "sampling engine chose are not part of a rollout",
                hint="train a dense model",
            )


class Known(NamedTuple):
    """Log-probabilities of one sample's sampled tokens under policies that do not change."""

    behaviour: Tensor | None
    """Under the version that sampled it; None where the pass with gradient computes them."""
    reference: Tensor | None
    """Under the base model, if the loss has a KL term."""


class Passes:
    """Computes log-probabilities of samples under the policies of a step."""

    def __init__(
        self,
        trained: Any,
        published: Callable[[PolicyVersion], Weights | None],
        *,
        temperature: float,
        micro_batch_tokens: int,
        compute_dtype: ComputeType = "float32",
        recomputed: Recompute = "none",
        is_packed: bool | None = None,
        is_whole: bool = True,
    ) -> None:
        """`published` returns a version's weights, which replace the model's for a pass.
        `is_packed` says whether samples may share rows; None tests it, which needs loaded weights.
        `is_whole` says that the model will not be sharded.
        """
        switch_off_dropout(trained)
        self.is_packed = understands_packing(trained) if is_packed is None else is_packed
        if self.is_packed:
            dtype = getattr(torch, compute_dtype)
            trained.set_attn_implementation(fastest(trained, trained.device, dtype))
        logger.info("samples share rows" if self.is_packed else "samples are padded to rows")
        self._cost = cost_of(trained)
        self._flops = 0.0
        self._computing = ComputeCopy(trained, compute_dtype)
        quicken(self._computing.model)
        recompute(self._computing.model, recomputed)
        if self.is_packed:
            narrow(self._computing.model)
        self._adds_at_once = is_whole and self._computing.model is trained
        if self._adds_at_once:
            add_rows_at_once(trained.get_input_embeddings())
        self._published = published
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._seen: dict[int, tuple[TrainingSample, Tensor]] = {}
        """Samples that were checked for mismatch, by identity, with their log-probabilities."""

    def pack(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """Return the micro-batches of some samples."""
        return pack(samples, self._micro_batch_tokens, is_padded=not self.is_packed)

    def refresh(self) -> None:
        """Compute with the trained weights as they are now; call it after every change."""
        self._computing.refresh()

    def spent(self) -> float:
        """Return the model's floating-point operations since the last call."""
        flops, self._flops = self._flops, 0.0
        return flops

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy [N] of a micro-batch's tokens, with their gradient.

        For losses that need all tokens' values before any gradient.
        """
        self._flops += self._cost.of(batch.work, with_gradient=torch.is_grad_enabled())
        hidden_ND = batch.hidden(self._computing.model)
        targets_N = batch.targets_N.to(hidden_ND.device)
        return token_logprobs(hidden_ND, self._head(), targets_N, self._temperature)

    def objective(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of a loss over tokens with gradient, and log-probability and entropy [N]
        without; `objective` as `muster.trainer.learn.logprob.token_objective` takes it.
        """
        self._flops += self._cost.of(batch.work, with_gradient=True)
        hidden_ND = batch.hidden(self._computing.model)
        targets_N = batch.targets_N.to(hidden_ND.device)
        return token_objective(hidden_ND, self._head(), targets_N, self._temperature, objective)

    def _head(self) -> Head:
        return replace(head_of(self._computing.model), adds_at_once=self._adds_at_once)

    def accompany(self, batch: MicroBatch) -> None:
        """Compute a filler with zero gradient, because the other ranks' passes need this rank."""
        logp_N, _ = self.logprobs(batch)
        (logp_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]  # torch's stub

    @torch.no_grad()
    def read_policies(
        self, steps: Sequence[Sequence[TrainingSample]], *, with_reference: bool
    ) -> list[list[Known]]:
        """Return each sample's log-probabilities under fixed policies, by optimiser step.

        Call it before the first optimiser step. Policies are read one at a time, each once.
        """
        samples = [sample for part in steps for sample in part]
        first = len(steps[0]) if steps else 0
        behaviour: list[Tensor | None] = [None] * len(samples)
        reference: list[Tensor | None] = [None] * len(samples)
        is_adapter = is_adapted(self._computing.model)
        if with_reference and is_adapter:
            with adapter_off(self._computing.model):
                reference = [logp for logp, _ in self._of_each(samples)]
        reads_base = with_reference and not is_adapter
        for version in self._versions(samples, {BASE} if reads_base else set()):
            weights = self._published(version)
            is_current = self._is_current(weights)
            # Under the current policy the first optimiser step's own pass gives the values.
            due = {
                i: self._seen.get(id(sample), (sample, None))[1]
                for i, sample in enumerate(samples)
                if sample.policy_version == version and not (is_current and i < first)
            }
            is_reference = reads_base and version == BASE
            asked = [
                i for i in range(len(samples)) if is_reference or (i in due and due[i] is None)
            ]
            found = self._under(weights, is_current, [samples[i] for i in asked])
            due |= {i: logp for i, (logp, _) in zip(asked, found, strict=True) if i in due}
            for i, logp in due.items():
                behaviour[i] = logp
            if is_reference:
                reference = [logp for logp, _ in found]
        self._seen.clear()
        known = zip(behaviour, reference, strict=True)
        return [[Known(*next(known)) for _ in part] for part in steps]

    @torch.no_grad()
    def surprise(self, samples: Sequence[TrainingSample]) -> list[float]:
        """Return per sample the mean over its tokens of -log p - entropy, in nats, under the policy
        version that sampled it: 0 in expectation if that version did; nan where p is not a number.

        The next `read_policies` does not read these versions again for the same samples.
        """
        excess = [math.nan] * len(samples)
        for version in self._versions(samples, set()):
            mine = [i for i, s in enumerate(samples) if s.policy_version == version]
            found = self._under(self._published(version), False, [samples[i] for i in mine])
            for i, (logp, entropy) in zip(mine, found, strict=True):
                excess[i] = float(-(logp + entropy).mean())
                self._seen[id(samples[i])] = samples[i], logp
        return excess

    @torch.no_grad()
    def current(self, batch: MicroBatch) -> Tensor:
        """Return each token's log-probability [N] under the policy in training as it is now."""
        return self.logprobs(batch)[0]

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Tell whether a short pass of the policy in training gives numbers; on all ranks alike."""
        flops = self._flops
        values = [value for batch in self.pack([FILLER]) for value in self.logprobs(batch)]
        self._flops = flops
        return all(bool(value.isfinite().all()) for value in values)

    def _versions(
        self, samples: Sequence[TrainingSample], more: set[PolicyVersion]
    ) -> list[PolicyVersion]:
        """Return in order the policy versions that passes over samples need, and `more`."""
        return sorted({PolicyVersion(sample.policy_version) for sample in samples} | more)

    def _under(
        self, weights: Weights | None, is_current: bool, samples: Sequence[TrainingSample]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return `_of_each` under a version's weights; `is_current` if the model has them now."""
        if is_current or not self._is_asked(samples):
            return self._of_each(samples)
        model = self._computing.model
        with merged_in(model, weights) if is_adapted(model) else standing_in(model, weights):
            return self._of_each(samples)

    def _is_asked(self, samples: Sequence[TrainingSample]) -> bool:
        """Tell whether there is anything to compute."""
        return bool(samples)

    def _of_each(self, samples: Sequence[TrainingSample]) -> list[tuple[Tensor, Tensor]]:
        """Return log-probabilities and entropies of each sample's tokens, as the model is now."""
        found: list[Any] = [None] * len(samples)
        for batch in self.pack(samples):
            values = self.logprobs(batch)
            if batch.order:
                lengths = batch.row_N.bincount().tolist()
                parts = zip(*(torch.split(value, lengths) for value in values), strict=True)
                for place, part in zip(batch.order, parts, strict=True):
                    found[place] = part
        return found

    def _is_current(self, weights: Weights | None) -> bool:
        """Tell whether a version's weights equal the model's, in the compute format."""
        # A base with its adapter beside it differs from the merged weights by rounding.
        if weights is None or is_adapted(self._computing.model):
            return False
        own = named_weights(self._computing.model)
        weights = by_own_names(self._computing.model, weights)
        return own.keys() == weights.keys() and all(
            torch.equal(weights[name].to(value.device, value.dtype), value)
            for name, value in own.items()
        )


class ComputeCopy:
    """The model that runs the passes, in the compute format, for the trained model."""

    def __init__(self, trained: Any, dtype: ComputeType) -> None:
        """With float32 there is no copy: the trained model runs the passes. A model with an adapter
        needs no copy either: its weights that are not trained are converted in place.
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
        """Copy the trained weights; call it before the first micro-batch of an optimiser step."""
        if self.model is self._trained:
            return
        with torch.no_grad():
            pairs = zip(self.model.parameters(), self._trained.parameters(), strict=True)
            for own, trained in pairs:
                own.copy_(trained)


def shorten(model: Any, dtype: torch.dtype, *, but_trained: bool = False) -> Any:
    """Return the model with its parameters converted in place, with `but_trained` only those that
    are not trained; buffers keep their format.
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
