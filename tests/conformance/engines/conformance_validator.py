"""The validator's path in the suite: one prefill, then proofs and choices against limits.

The limits are the least that any calibration has: what passes here passes everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from conformance_policy import HIDDEN, VOCABULARY

from muster.inference.engine import Completion, InferenceEngine, Prefill, Request
from muster.inference.limits import FLOORS, chunk_limits, sampler_limits
from muster.inference.measuring import NumberFormat
from muster.inference.sampling import replay
from muster.protocol.recipe import ProofRecipe
from muster.toploc import ChunkResult, verify_proofs_many
from muster.toploc.calibration import CalibratedModel, Calibration

PROOF = ProofRecipe()


def least_limits(dtype: NumberFormat) -> Calibration:
    """Return the calibration of measurements without any error."""
    flawless = ChunkResult(0, 0.0, 0.0, 0, PROOF.topk)
    return Calibration(
        model=CalibratedModel(
            name="conformance",
            architecture="Qwen3ForCausalLM",
            hidden_size=HIDDEN,
            vocab_size=VOCABULARY,
            engine=dtype,
        ),
        chunk=chunk_limits([flawless], PROOF, FLOORS[dtype]),
        sampler=sampler_limits(np.zeros(1, np.float32), 1, FLOORS[dtype]),
        fraud_strikes=2,
    )


def prefill_of(
    engine: InferenceEngine, requests: Sequence[Request], made: Sequence[Completion]
) -> list[Prefill]:
    """Return what an engine recomputes of completions."""
    return engine.prefill(
        [(r.prompt_tokens, c.tokens) for r, c in zip(requests, made, strict=True)]
    )


def verdicts(
    dtype: NumberFormat,
    requests: Sequence[Request],
    made: Sequence[Completion],
    prefills: Sequence[Prefill],
) -> list[str]:
    """Return per sample "accepted", "proofs" or "sampling": the check that failed first.

    All requests have the first one's temperature.
    """
    limits = least_limits(dtype)
    chunks = verify_proofs_many([p.hidden_TH for p in prefills], [c.proofs for c in made])
    replayed = replay(
        [p.logits_TV for p in prefills],
        [c.tokens for c in made],
        [r.seed for r in requests],
        requests[0].temperature,
    )
    return [
        "proofs"
        if not all(limits.chunk_passes(result) for result in results)
        else "accepted"
        if limits.sampler_passes(margins_T)
        else "sampling"
        for results, margins_T in zip(chunks, replayed.margins, strict=True)
    ]
