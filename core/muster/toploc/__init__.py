"""TOPLOC: proofs that a completion's hidden states came from the policy, and the limits on them.

Specified in docs/protocol.md section 6. It uses a compiled kernel, or numpy without one. It accepts
torch tensors, but does not import torch. Knows nothing of samples' tokens or verdicts.
"""

from muster.toploc.calibration import Calibration as Calibration
from muster.toploc.chunks import ChunkResult as ChunkResult
from muster.toploc.incremental import IncrementalBuilder as IncrementalBuilder
from muster.toploc.proofs import (
    build_proofs as build_proofs,
    build_proofs_many as build_proofs_many,
    verify_proofs as verify_proofs,
    verify_proofs_many as verify_proofs_many,
)
from muster.toploc.wire import split_proofs as split_proofs
