"""The honest matrix: every worker's way against every validator's. Axes: N tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from muster.inference.engine import Prefill, Request
from muster.inference.measuring import (
    VALIDATORS,
    WORKERS,
    Bench,
    Errors,
    Party,
    Plan,
    one_token,
)
from muster.toploc import ChunkResult

_MOST_REDRAWS = 16
_REDRAWN_VALUES = 1 << 22
"""Noise values drawn per part and way, but for one draw at least."""


@dataclass(slots=True)
class Honest:
    """What honest workers and validators were seen to differ by."""

    errors: dict[str, Errors] = field(default_factory=dict)
    """Per pair of ways."""
    redrawn: dict[str, list[npt.NDArray[np.float32]]] = field(default_factory=dict)
    """Margins of single tokens per pair of ways, the noise drawn afresh."""
    shifts: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Per pair, how the probability of EOS differs: sums over tokens, signed and absolute."""

    def add(self, pair: str, errors: Errors) -> None:
        """Take some samples of a pair of ways."""
        self.errors[pair] = self.errors[pair] + errors if pair in self.errors else errors

    def chunks(self) -> list[ChunkResult]:
        """Return the chunks of all pairs."""
        return [result for errors in self.errors.values() for result in errors.all_chunks()]

    def token_margins(self) -> npt.NDArray[np.float32]:
        """Return the margins of all tokens, those of the work itself and those redrawn."""
        of_work = [margins for errors in self.errors.values() for margins in errors.margins]
        return np.concatenate([*of_work, *self.margins_by_pair()])

    def margins_by_pair(self) -> list[npt.NDArray[np.float32]]:
        """Return the redrawn margins of every pair."""
        return [np.concatenate(margins) for margins in self.redrawn.values()]

    def leans(self) -> list[float]:
        """Return how far every pair's choices lean to EOS or from it: 0 evenly, 1 always."""
        sums = [np.sum(shifts, axis=0) for shifts in self.shifts.values()]
        return [float(abs(signed) / absolute) for signed, absolute in sums if absolute > 0]


def measure_honest(
    bench: Bench, others: Sequence[Party], requests: list[Request], plan: Plan
) -> Honest:
    """Return errors of every worker way under every validator way, of all parties."""
    parties = [bench, *others]
    made = {
        f"{_label(party, parties)}{way.name}": party.generate(requests, way)
        for party in parties
        for way in party.ways(WORKERS[plan.profile])
    }
    made["one token only"] = bench.generate(one_token(requests))
    honest, ends = Honest(), sorted(bench.engine.eos_token_ids)
    for worker, work in made.items():
        for start, part in bench.parts(work):
            reference = bench.recompute(part)
            for party in parties:
                for way in party.ways(VALIDATORS[plan.profile]):
                    few = part if way.samples is None else part[: max(0, way.samples - start)]
                    if not few.completions:
                        continue
                    prefills = party.recompute(few, way)
                    pair = f"{worker}, validated {_label(party, parties)}{way.name}"
                    honest.add(pair, party.compare(few, prefills))
                    if worker == next(iter(made)):
                        # One worker's tokens are as good as any: the margins are redrawn.
                        temperature = plan.recipe.sampling.temperature
                        redrawn = redrawn_margins(reference, prefills, temperature, seed=plan.seed)
                        honest.redrawn.setdefault(pair, []).append(redrawn)
                        shift = end_shift(reference, prefills, temperature, ends)
                        honest.shifts.setdefault(pair, []).append(shift)
    return honest


def _label(party: Party, parties: Sequence[Party]) -> str:
    return "" if len(parties) == 1 else f"{party.name} "


def redrawn_margins(
    worker: Sequence[Prefill], validator: Sequence[Prefill], temperature: float, *, seed: int
) -> npt.NDArray[np.float32]:
    """Return the margins of choices under one party's logits, replayed under another's.

    The noise is drawn afresh, several times per token where that is cheap: honest margins are
    nearly all zero, and it takes many draws to see how large the rest may be.
    """
    random, scale = np.random.default_rng(seed), np.float32(temperature)
    own_NV = np.concatenate([prefill.logits_TV for prefill in worker[: len(validator)]]) / scale
    other_NV = np.concatenate([prefill.logits_TV for prefill in validator]) / scale
    found = []
    for _ in range(min(_MOST_REDRAWS, max(1, _REDRAWN_VALUES // own_NV.size))):
        noise_NV = random.gumbel(size=own_NV.shape).astype(np.float32)
        chosen_N = (own_NV + noise_NV).argmax(axis=1)
        scores_NV = other_NV + noise_NV
        found.append(scores_NV.max(axis=1) - scores_NV[np.arange(len(chosen_N)), chosen_N])
    return np.concatenate(found)


def end_shift(
    worker: Sequence[Prefill], validator: Sequence[Prefill], temperature: float, ends: Sequence[int]
) -> tuple[float, float]:
    """Return the sums over tokens of the difference of the probability of EOS, signed and absolute:
    how many more tokens become EOS here than there, and how many flip at all.

    Less than a flip in a billion tokens is rounding that no choice ever shows.
    """
    own, other = (
        np.concatenate([_end_odds(p.logits_TV / np.float32(temperature), ends) for p in prefills])
        for prefills in (worker[: len(validator)], validator)
    )
    shift = np.where(np.abs(own - other) > 1e-9, own - other, 0.0)
    return float(shift.sum()), float(np.abs(shift).sum())


def _end_odds(scaled_TV: npt.NDArray[np.float32], ends: Sequence[int]) -> npt.NDArray[np.float64]:
    exact = scaled_TV.astype(np.float64)
    weights = np.exp(exact - exact.max(axis=1, keepdims=True))
    odds: npt.NDArray[np.float64] = weights[:, list(ends)].sum(axis=1) / weights.sum(axis=1)
    return odds
