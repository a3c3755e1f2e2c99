"""Inference: verifiable sampling and its replay, engines, and the calibration of validation limits.

Importing the package does not import torch; `muster.inference.transformers_engine` and
`muster.inference.calibrate` do. It does not import tasks either, which an engine's process does not
need; `muster.inference.dialogue` does.
"""

from muster.inference.engine import (
    Completion as Completion,
    Examined as Examined,
    InferenceEngine as InferenceEngine,
    Request as Request,
    Sample as Sample,
)
from muster.inference.sampling import gumbel_noise as gumbel_noise
