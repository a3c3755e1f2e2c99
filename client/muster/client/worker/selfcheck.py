"""Whether a validator would accept what is about to be signed: asked while nothing is at stake.

A signature over disturbed work costs stake, and memory, drivers and weights do get disturbed. Part
of a submission is recomputed by one prefill, as validators do, and held to the run's own limits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from muster.client.measured import measure
from muster.client.validator.checks import count_strikes
from muster.client.validator.replay import Replay, replay_rows
from muster.inference import InferenceEngine
from muster.protocol.errors import EngineError, ProofError
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.toploc import Calibration

SHARE = 0.05
"""Of the time that generating took, what the check may take."""
LEAST_S = 1.0
"""It may take this long in any case: what is small is checked whole."""
FIRST_ROWS = 4
"""Rows that are always checked, and tell how many more there is time for."""


def require_sound(
    rows: Sequence[Rollout],
    recipe: Recipe,
    calibration: Calibration,
    engine: InferenceEngine,
    generating_s: float,
) -> int:
    """Check rows drawn at random, as many as there is time for, and return how many.

    Raises EngineError when one fails check 6 or 7 (docs/protocol.md section 7).
    """
    drawn = random.sample(rows, len(rows))
    try:
        started = time.perf_counter()
        replays = replay_rows(drawn[:FIRST_ROWS], engine, recipe)
        spent_s = time.perf_counter() - started
        left_s = max(LEAST_S, SHARE * generating_s) - spent_s
        more = int(left_s / max(spent_s, 1e-6) * FIRST_ROWS)
        if more > 0:
            replays += replay_rows(drawn[FIRST_ROWS : FIRST_ROWS + more], engine, recipe)
    except ProofError as error:
        raise _disturbed(str(error)) from error
    if strikes := count_strikes(replays, calibration):
        raise _disturbed(
            f"{strikes} strikes in {len(replays)} rows: {_worst(replays, calibration)}"
        )
    return len(replays)


def _disturbed(what: str) -> EngineError:
    return EngineError(
        f"this machine's own work fails its check: {what}",
        hint="nothing was signed; driver, memory, weights or software are disturbed: muster doctor",
    )


def _worst(replays: Sequence[Replay], calibration: Calibration) -> str:
    found = measure(replays, calibration)
    return ", ".join(str(statistic) for statistic in found if not statistic.passes)
