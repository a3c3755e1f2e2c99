"""Inference: verifiable sampling and its replay, engines, and the calibration of validation limits.

Importing the package does not import torch; `muster.inference.transformers_engine` and
`muster.inference.calibrate` do. Nor does it import tasks, which the process of an engine has no
use for; `muster.inference.dialogue` does.
"""

from muster.inference.engine import (
    Completion as Completion,
    Examined as Examined,
    InferenceEngine as InferenceEngine,
    Request as Request,
    Sample as Sample,
)
from muster.inference.sampling import gumbel_noise as gumbel_noise
