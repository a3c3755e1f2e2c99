"""Inference: verifiable sampling and its replay, engines, and the calibration of validation limits.

Importing the package does not import torch; `muster.inference.transformers_engine` and
`muster.inference.calibrate` do.
"""

from muster.inference.dialogue import Claimed, Fault, Followed, Played, follow, play
from muster.inference.engine import Completion, InferenceEngine, Prefill, Request
from muster.inference.replaying import ReplayResult, replay
from muster.inference.sampling import gumbel_noise

__all__ = [
    "Claimed",
    "Completion",
    "Fault",
    "Followed",
    "InferenceEngine",
    "Played",
    "Prefill",
    "ReplayResult",
    "Request",
    "follow",
    "gumbel_noise",
    "play",
    "replay",
]
