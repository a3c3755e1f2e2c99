"""The validator's path in the suite: what an engine finds, against limits.

The limits are the least that any calibration has: what passes here passes everywhere.
"""

from collections.abc import Sequence

import numpy as np
from conformance_policy import HIDDEN, VOCABULARY

from muster.inference.calibrated_limits import FLOORS, chunk_limits, sampler_limits
from muster.inference.calibration_plan import NumberFormat
from muster.inference.engine import Completion, Examined, InferenceEngine, Request, Sample
from muster.protocol.recipe import ProofRecipe
from muster.toploc import ChunkResult
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


def examined(
    engine: InferenceEngine, requests: Sequence[Request], made: Sequence[Completion]
) -> list[Examined]:
    """Return what an engine finds in completions; all requests have the first one's temperature."""
    samples = [
        Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs)
        for r, c in zip(requests, made, strict=True)
    ]
    return engine.examine(samples, proof=PROOF, temperature=requests[0].temperature)


def verdicts(
    dtype: NumberFormat,
    engine: InferenceEngine,
    requests: Sequence[Request],
    made: Sequence[Completion],
) -> list[str]:
    """Return per sample "accepted", "proofs" or "sampling": the check that failed first."""
    limits = least_limits(dtype)
    return [
        "proofs"
        if not all(map(limits.chunk_passes, found.chunks))
        else "accepted"
        if limits.sampler_passes(found.replayed.margins_T)
        else "sampling"
        for found in examined(engine, requests, made)
    ]
