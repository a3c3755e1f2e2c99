"""What checks 6 and 7 measured, each statistic beside its limit: for people who want to know why.

Knows the calibration and the replays, nothing of files, chains or verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from muster.client.validator.replay import Replay
    from muster.toploc import Calibration, ChunkResult


@dataclass(frozen=True, slots=True)
class Statistic:
    """The worst value of one statistic over a submission."""

    name: str
    """What is compared."""
    worst: float
    """The largest value found."""
    limit: float
    """The limit it was held against there."""

    @property
    def passes(self) -> bool:
        """Whether it is inside its limit; NaN is not."""
        return self.worst <= self.limit

    def __str__(self) -> str:
        mark = "<=" if self.passes else ">"
        return f"{self.name} {self.worst:.4g} {mark} {self.limit:.4g}"


def measure(replays: Sequence[Replay], calibration: Calibration) -> list[Statistic]:
    """Return each statistic of checks 6 and 7 where it came closest to its limit, or beyond."""
    chunks = [chunk for replay in replays for chunk in replay.chunks]
    found = [_worst(name, chunks, calibration) for name in _CHUNK_STATISTICS] if chunks else []
    if replays:
        sampler = calibration.sampler
        largest = max(float(np.max(replay.margins, initial=0.0)) for replay in replays)
        outside = max(int((~(replay.margins <= sampler.margin)).sum()) for replay in replays)
        found.append(
            Statistic("tokens outside the margin", outside, sampler.max_outside_per_sample)
        )
        # A margin alone fails nothing: so many tokens of a sample may exceed it.
        allowance = sampler.margin if sampler.max_outside_per_sample == 0 else float("inf")
        found.append(Statistic("largest margin", largest, allowance))
        if sampler.wide is not None:
            counts = [calibration.wide_tokens(replay.margins, replay.ends) for replay in replays]
            wide, ends = (sum(column) for column in zip(*counts, strict=True))
            found.append(Statistic("wide tokens", wide, sampler.wide.most))
            found.append(Statistic("wide tokens at an end", ends, sampler.wide.most_ends))
    return found


def _worst(name: str, chunks: Sequence[ChunkResult], calibration: Calibration) -> Statistic:
    limits, topk = calibration.chunk, calibration.proof.topk
    fixed = {
        "mantissa_error_mean": limits.max_mantissa_error_mean,
        "mantissa_error_median": limits.max_mantissa_error_median,
        "decoy_matches": float(limits.max_decoy_matches),
    }
    # A chunk of fewer points gets its share of these.
    shared = {
        "exponent_mismatches": limits.max_exponent_mismatches,
        "sign_mismatches": limits.max_sign_mismatches,
    }
    candidates = [
        Statistic(
            name.replace("_", " "),
            float(getattr(chunk, name)),
            fixed[name] if name in fixed else float(shared[name] * chunk.points // topk),
        )
        for chunk in chunks
    ]
    return max(candidates, key=lambda each: (not each.passes, each.worst - each.limit))


_CHUNK_STATISTICS = (
    "exponent_mismatches",
    "mantissa_error_mean",
    "mantissa_error_median",
    "sign_mismatches",
    "decoy_matches",
)
