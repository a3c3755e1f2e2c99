"""Generating samples, top to bottom.

 1. admit samples while there is room, and compute their prompts, each once for all its samples;
 2. choose a token per row by `logit / T + noise`, and commit to the hidden states it came from;
 3. drop the rows that ended, which makes room for the next samples;
 4. run one forward pass over the rest, and go on with 1;
 5. take the last proofs, which a thread has been building meanwhile.

Several calls share the rows: the samples of the call with the smallest `due` start first, and those
of the next call take the rows that remain. Apart from rounding, a sample's tokens do not depend on
its neighbours: noise belongs to its request. Axes: R rows that are being generated, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.device_proofs import builder_on
from muster.inference.engine import Completion, Progress, Request
from muster.inference.forward import Predicted, Tokens, to_rows
from muster.inference.sampler import choices
from muster.inference.turns import Turn
from muster.protocol.recipe import ProofRecipe

_HELD_STEPS = 16
"""Steps whose hidden states go to the builder in one call: a call costs more than a step's rows."""

Integers = npt.NDArray[np.int64]


class DecodingRows(Protocol):
    """Keys and values of the samples that are being generated, in rows 0 to R - 1."""

    def room(self) -> int:
        """Return how many samples may be admitted now."""

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Append a row per prompt; return the hidden states and logits of their first tokens."""

    def step(self, tokens_R: Integers) -> Predicted:
        """Take one more token per row; return the hidden states and logits of the next."""

    def keep(self, order: Integers) -> None:
        """Row i becomes what row `order[i]` was; the others are dropped."""


@dataclass(eq=False, slots=True)
class Call:
    """The samples of one `generate`."""

    samples: list[int]
    """Their numbers in the decode, in the order asked."""
    due: int
    """Calls with a smaller number go first."""
    waiting: list[tuple[int, Request]]
    """Samples that have not started, in the order in which they will."""
    ended: int = 0
    """Samples that are done."""
    ended_tokens: int = 0
    """Completion tokens of the samples that are done."""

    @property
    def is_over(self) -> bool:
        """Whether all samples are done."""
        return self.ended == len(self.samples)


class _Live(NamedTuple):
    """The state of each row."""

    sample_R: Integers
    """Number of the row's sample."""
    seed_R: npt.NDArray[np.uint64]
    position_R: npt.NDArray[np.uint64]
    """Noise position of the next token."""
    temperature_R: npt.NDArray[np.float32]
    left_R: Integers
    """Tokens that the row may still get."""
    last_R: Integers
    """Last token of the row."""

    @staticmethod
    def begun(samples: Sequence[tuple[int, Request]]) -> _Live:
        """Return the rows of samples without tokens."""
        numbers, asked = zip(*samples, strict=True) if samples else ((), ())
        return _Live(
            np.array(numbers, np.int64),
            np.array([r.seed for r in asked], np.uint64),
            np.array([r.position for r in asked], np.uint64),
            np.array([r.temperature for r in asked], np.float32),
            np.array([r.max_new_tokens for r in asked], np.int64),
            np.zeros(len(samples), np.int64),
        )

    def and_then(self, more: _Live) -> _Live:
        """Return these rows followed by others."""
        names = _Live._fields
        return _Live._make(np.concatenate([getattr(self, n), getattr(more, n)]) for n in names)

    def at(self, rows: Integers | slice) -> _Live:
        """Return some rows; views if `rows` is a slice."""
        return _Live._make(column[rows] for column in self)


@dataclass(eq=False)
class Decode:
    """Samples that are being generated, of any number of calls.

    One thread at a time may use it, under `torch.inference_mode`; `finish` needs neither.

    After a step fails, every later step raises the same error.
    """

    rows: DecodingRows
    length: int
    """Most positions that a sample may have in `rows`."""
    eos: npt.NDArray[np.bool_]
    """[V]: whether a token ends a completion."""
    proof: ProofRecipe
    device: torch.device
    """Device of the rows."""
    is_wide: bool
    """Whether there may be more rows than the largest call has samples. On a CPU a step's time
    grows with its rows: more of them would delay the call that is due first."""
    calls: list[Call] = field(default_factory=list)
    """Calls that have not left, the one that is due first in front."""
    lead: Turn = field(default_factory=Turn)
    """Held by the call that takes steps for all calls: alternating threads would cost more."""

    def __post_init__(self) -> None:
        self._proofs = builder_on(self.device, self.proof)
        self._live = _Live.begun([])
        self._tokens: dict[int, list[int]] = {}
        self._call_of: dict[int, Call] = {}
        self._free: list[int] = []
        self._held: list[torch.Tensor] = []
        self._failure: BaseException | None = None

    def close(self) -> None:
        """End the thread that builds proofs."""
        self._proofs.close()

    def takes(self, longest: int, proof: ProofRecipe) -> bool:
        """Return whether samples of `longest` positions with such proofs may be generated here."""
        return self._failure is None and longest <= self.length and proof == self.proof

    def begin(self, requests: Sequence[Request], due: int) -> Call:
        """Add the samples of another call."""
        given = len(self._tokens) + len(self._free)
        self._free += range(given, given + len(requests) - len(self._free))
        numbers = [self._free.pop() for _ in requests]
        order = plan_decode([request.prompt_tokens for request in requests])
        call = Call(numbers, due, [(numbers[i], requests[i]) for i in order])
        self._tokens |= {number: [] for number in numbers}
        self._call_of |= dict.fromkeys(numbers, call)
        self.calls = sorted([*self.calls, call], key=lambda each: each.due)
        return call

    def step(self) -> bool:
        """Give free rows to waiting samples, and every row one more token; return whether that
        ended a call.
        """
        if self._failure is not None:
            raise self._failure
        over = sum(call.is_over for call in self.calls)
        try:
            while joining := self._joining():
                self._admit(joining)
            if len(self._live.sample_R):
                self._take(0, self.rows.step(self._live.last_R))
        except BaseException as failure:
            # Rows, tokens and proofs may now be of different steps: no call can go on.
            self._failure = failure
            raise
        return sum(call.is_over for call in self.calls) > over

    def progress(self, call: Call) -> Progress:
        """Return how far a call is."""
        tokens = sum(len(self._tokens[number]) for number in call.samples)
        return Progress(tokens, call.ended, call.ended_tokens)

    def finish(self, call: Call) -> list[Completion]:
        """Return the completions of a call that is over, in the order asked."""
        return [
            Completion(tuple(self._tokens[number]), self._proofs.take(number))
            for number in call.samples
        ]

    def leave(self, call: Call) -> None:
        """Forget a call; its unfinished samples are given up."""
        self.calls.remove(call)
        if self._failure is not None:
            return
        try:
            self._give_up(call)
            for number in call.samples:
                self._proofs.take(number)
        except Exception as failure:  # A lack of memory, for example, ends a builder of proofs.
            # The other calls get the error at their next step.
            self._failure = failure
        for number in call.samples:
            del self._tokens[number], self._call_of[number]
        self._free += call.samples

    def _give_up(self, call: Call) -> None:
        rows = np.flatnonzero(np.isin(self._live.sample_R, call.samples))
        if len(rows):
            self._commit(self._live.sample_R)
            self._proofs.end(self._live.sample_R[rows])
            self._drop(rows)

    def _joining(self) -> list[tuple[int, Request]]:
        """Remove from the waiting samples those that start next, and return them."""
        room, joining = self.rows.room(), list[tuple[int, Request]]()
        if not self.is_wide:
            most = max((len(call.samples) for call in self.calls), default=0)
            room = min(room, max(0, most - len(self._live.sample_R)))
        for call in self.calls:
            taken = call.waiting[: room - len(joining)]
            del call.waiting[: len(taken)]
            joining += taken
        return joining

    def _admit(self, samples: Sequence[tuple[int, Request]]) -> None:
        self._commit(self._live.sample_R)
        first = len(self._live.sample_R)
        self._live = self._live.and_then(_Live.begun(samples))
        self._take(first, self.rows.admit([request.prompt_tokens for _, request in samples]))

    def _take(self, first: int, predicted: Predicted) -> None:
        """Choose the next token of the rows from `first` on, and drop those that it ends."""
        hidden, logits = predicted
        live = self._live.at(slice(first, None))
        chosen = choices(logits, live.seed_R, live.position_R, live.temperature_R).cpu().numpy()
        self._held.append(hidden)
        for number, token in zip(live.sample_R.tolist(), chosen.tolist(), strict=True):
            self._tokens[number].append(token)
        live.last_R[:] = chosen
        live.position_R[:] += np.uint64(1)
        live.left_R[:] -= 1
        has_ended = self.eos[chosen] | (live.left_R == 0)
        if first or len(self._held) == _HELD_STEPS or has_ended.any():
            self._commit(live.sample_R)
        if has_ended.any():
            self._end(live.sample_R[has_ended])
            self._drop(first + np.flatnonzero(has_ended))

    def _commit(self, samples: Integers) -> None:
        """Pass the held hidden states to the builder: those of the same rows, for some steps."""
        if self._held:
            self._proofs.extend(samples, to_rows(torch.stack(self._held, dim=1)))
            self._held.clear()

    def _end(self, samples: Integers) -> None:
        self._proofs.end(samples)
        for number in samples.tolist():
            call = self._call_of[number]
            call.ended += 1
            call.ended_tokens += len(self._tokens[number])

    def _drop(self, ended: Integers) -> None:
        """Fill the places of ended rows with the last rows, so that few rows move."""
        is_live = np.ones(len(self._live.sample_R), bool)
        is_live[ended] = False
        left = int(is_live.sum())
        order = np.arange(left)
        order[~is_live[:left]] = left + np.flatnonzero(is_live[left:])
        self.rows.keep(order)
        self._live = self._live.at(order)


def plan_decode(prompts: Sequence[Tokens]) -> list[int]:
    """Return the order to generate in: by length, with equal prompts side by side."""
    return sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), tuple(prompts[i])))
