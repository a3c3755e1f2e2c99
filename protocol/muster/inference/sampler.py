"""Chooses the tokens of a batch, step by step, on whatever device its logits are.

On a CPU the noise of a small batch is made for all its positions in one go. Axes: R rows of the
batch, of which only some may still be live, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from muster.inference import device_sampling, sampling
from muster.inference.engine import Request

_PRECOMPUTED_ELEMENTS = 1 << 22
"""Noise values held in advance: 16 MiB; above that they are made position by position."""


class Sampler:
    """The choices of one batch."""

    def __init__(self, requests: Sequence[Request], vocab: int, device: torch.device) -> None:
        self._seeds_R = np.array([r.seed for r in requests], np.uint64)
        self._temperature_R = np.array([r.temperature for r in requests], np.float32)
        self._vocab = vocab
        self._on_cpu = device.type == "cpu"
        longest = max(r.max_new_tokens for r in requests)
        self._block: npt.NDArray[np.float32] | None = None
        if self._on_cpu and len(requests) * longest * vocab <= _PRECOMPUTED_ELEMENTS:
            self._block = sampling.noise_block(self._seeds_R, range(longest), vocab)

    def choose(
        self, rows: npt.NDArray[np.int64], logits: torch.Tensor, position: int
    ) -> npt.NDArray[np.int64]:
        """Return the token at `position` of every row in `rows`, given their float32 logits."""
        if self._on_cpu:
            noise = self._noise(rows, position)
            return sampling.choose(logits.numpy(), noise, self._temperature_R[rows])
        temperature = torch.from_numpy(self._temperature_R[rows]).to(logits.device)
        positions = [position] * len(rows)
        seeds = self._seeds_R[rows].tolist()
        drawn = device_sampling.gumbel_noise(seeds, positions, self._vocab, device=logits.device)
        choice: npt.NDArray[np.int64] = (
            device_sampling.choose(logits, drawn, temperature).cpu().numpy()
        )
        return choice

    def _noise(self, rows: npt.NDArray[np.int64], position: int) -> npt.NDArray[np.float32]:
        if self._block is not None:
            precomputed: npt.NDArray[np.float32] = self._block[rows, position]
            return precomputed
        positions = np.full(len(rows), position, np.uint64)
        return sampling.gumbel_noise(self._seeds_R[rows], positions, self._vocab)
