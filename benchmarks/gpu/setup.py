"""Shared setup of the parts: device, models, and clock."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.inference.size import VOCAB, write_model

Figures = tuple[dict[str, float], dict[str, Any]]
"""Metrics by id, and details."""
TINY_VOCAB = 1_024
"""Tokens of a tiny model."""


class Missing(Exception):
    """A requirement of a part is missing on this machine."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where parts compute, and how much."""

    device: str
    """As torch names it."""
    is_tiny: bool
    """Whether sizes are so small that a CPU needs only seconds."""
    models: Path
    """Folder of models that parts share, each written by the first that needs it."""

    def model(self, shape: str) -> Path:
        """Return the folder of a model of random weights, of a shape of users or a tiny one."""
        shape = "small" if self.is_tiny else shape
        folder = self.models / shape
        if not (folder / "tokenizer.json").exists():
            write_model(folder, shape, vocab=self.pick(TINY_VOCAB, VOCAB))
        return folder

    def pick(self, tiny: int, real: int) -> int:
        """Return a size."""
        return tiny if self.is_tiny else real

    def now(self) -> float:
        """Return the time in seconds, once the device has done all queued work."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def memory_gb(self) -> float:
        """Return the peak device memory of torch in 10^9 bytes; 0 on a CPU."""
        if not self.device.startswith("cuda"):
            return 0.0
        return torch.cuda.max_memory_allocated(self.device) / 1e9
