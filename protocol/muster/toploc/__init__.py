"""TOPLOC: proofs that a completion's hidden states came from the policy, and the limits on them.

Specified in docs/protocol.md section 6. Numpy only; torch tensors are accepted, torch is not
imported. Knows nothing of files, samples' tokens or verdicts.
"""

from muster.toploc.calibration import Calibration
from muster.toploc.proofs import (
    ChunkResult,
    build_proofs,
    build_proofs_many,
    verify_proofs,
    verify_proofs_many,
)
from muster.toploc.wire import split_proofs

__all__ = [
    "Calibration",
    "ChunkResult",
    "build_proofs",
    "build_proofs_many",
    "split_proofs",
    "verify_proofs",
    "verify_proofs_many",
]
