"""Generating samples, top to bottom.

 1. admit samples while there is room: their prompts are computed, once for all samples of one;
 2. choose a token per row by `logit / T + noise`, and commit to the hidden states that predicted;
 3. drop the rows that ended, whose room is for the next samples;
 4. one forward pass over the rest, and on with 1;
 5. the last proofs, which a thread has been building meanwhile.

Axes: Q requests, R rows that are being generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.device_proofs import builder_on
from muster.inference.engine import Completion, Progress, Request, Watch
from muster.inference.forward import Predicted, Tokens, to_rows
from muster.inference.sampler import Sampler
from muster.protocol.recipe import ProofRecipe
from muster.toploc import IncrementalBuilder

_HELD_STEPS = 16
"""Steps whose hidden states are handed over at once: a call costs more than the rows of a step."""


class DecodingRows(Protocol):
    """Keys and values of the samples that are being generated, in rows 0 to R - 1."""

    def room(self) -> int:
        """Return how many samples may be admitted now."""

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Append a row per prompt; return what predicts their first tokens."""

    def step(self, tokens_R: npt.NDArray[np.int64]) -> Predicted:
        """Take one more token per row; return what predicts the next."""

    def keep(self, order: npt.NDArray[np.int64]) -> None:
        """Row i becomes what row `order[i]` was; the others are dropped."""


def generate(
    rows: DecodingRows,
    requests: Sequence[Request],
    sampler: Sampler,
    *,
    eos: npt.NDArray[np.bool_],
    proof: ProofRecipe,
    device: torch.device,
    watch: Watch | None = None,
) -> list[Completion]:
    """Return the requests' completions in the order asked; call under `torch.inference_mode`.

    `eos` says of every token id whether it ends a completion; `device` is where rows compute. There
    is at least one request. `watch` hears of every few steps.
    """
    with builder_on(device, proof) as proofs:
        return _Decode(rows, requests, sampler, eos, proofs).run(watch)


class _Decode:
    """The state of one `generate`: which request each row is, and what it has so far."""

    def __init__(
        self,
        rows: DecodingRows,
        requests: Sequence[Request],
        sampler: Sampler,
        eos: npt.NDArray[np.bool_],
        proofs: IncrementalBuilder,
    ) -> None:
        self._rows, self._requests, self._sampler = rows, requests, sampler
        self._is_eos_V, self._proofs = eos, proofs
        self._limits_Q = np.array([r.max_new_tokens for r in requests])
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._live_R = np.empty(0, np.int64)
        self._position_R = np.empty(0, np.int64)
        self._last_R = np.empty(0, np.int64)
        self._held: list[torch.Tensor] = []

    def run(self, watch: Watch | None) -> list[Completion]:
        """Return the completions."""
        waiting = plan_decode([r.prompt_tokens for r in self._requests])
        while waiting or len(self._live_R):
            while waiting and (room := self._rows.room()):
                self._admit(np.array(waiting[:room]))
                waiting = waiting[room:]
            if len(self._live_R):
                self._take(0, self._rows.step(self._last_R))
            if watch is not None and not self._held:
                watch(self._progress(len(waiting)))
        return [
            Completion(tuple(tokens), self._proofs.take(i)) for i, tokens in enumerate(self._tokens)
        ]

    def _progress(self, waiting: int) -> Progress:
        tokens = sum(map(len, self._tokens))
        unended = sum(len(self._tokens[i]) for i in self._live_R.tolist())
        ended = len(self._tokens) - waiting - len(self._live_R)
        return Progress(tokens, ended, tokens - unended)

    def _admit(self, requests: npt.NDArray[np.int64]) -> None:
        self._commit(self._live_R)
        first = len(self._live_R)
        zeros = np.zeros(len(requests), np.int64)
        self._live_R = np.concatenate([self._live_R, requests])
        self._position_R = np.concatenate([self._position_R, zeros])
        self._last_R = np.concatenate([self._last_R, zeros])
        prompts = [self._requests[i].prompt_tokens for i in requests]
        self._take(first, self._rows.admit(prompts))

    def _take(self, first: int, predicted: Predicted) -> None:
        """Choose the next token of the rows from `first` on, and drop those that it ends."""
        hidden, logits = predicted
        live, position = self._live_R[first:], self._position_R[first:]
        chosen = self._sampler.choose(live, logits, position)
        self._held.append(hidden)
        for request, token in zip(live.tolist(), chosen.tolist(), strict=True):
            self._tokens[request].append(token)
        self._last_R[first:] = chosen
        position += 1
        has_ended = self._is_eos_V[chosen] | (self._limits_Q[live] == position)
        if first or len(self._held) == _HELD_STEPS or has_ended.any():
            self._commit(live)
        if has_ended.any():
            self._proofs.end(live[has_ended])
            self._drop(first + np.flatnonzero(has_ended))

    def _commit(self, live: npt.NDArray[np.int64]) -> None:
        """Hand over the hidden states held, which are those of the same rows at each step."""
        if self._held:
            self._proofs.extend(live, to_rows(torch.stack(self._held, dim=1)))
            self._held.clear()

    def _drop(self, ended: npt.NDArray[np.int64]) -> None:
        """Close the gaps that ended rows leave with the last rows, so that few are moved."""
        is_live = np.ones(len(self._live_R), bool)
        is_live[ended] = False
        left = int(is_live.sum())
        order = np.arange(left)
        order[~is_live[:left]] = left + np.flatnonzero(is_live[left:])
        self._rows.keep(order)
        self._live_R = self._live_R[order]
        self._position_R = self._position_R[order]
        self._last_R = self._last_R[order]


def plan_decode(prompts: Sequence[Tokens]) -> list[int]:
    """Return the order to generate in: prompts of like length together, equal ones side by side."""
    return sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), tuple(prompts[i])))
