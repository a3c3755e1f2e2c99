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
        self._first_R = np.array([r.position for r in requests], np.uint64)
        self._vocab = vocab
        self._on_cpu = device.type == "cpu"
        longest = max(r.max_new_tokens for r in requests)
        self._block: npt.NDArray[np.float32] | None = None
        if self._on_cpu and len(requests) * longest * vocab <= _PRECOMPUTED_ELEMENTS:
            self._block = sampling.noise_block(self._seeds_R, self._first_R, longest, vocab)

    def choose(
        self, rows: npt.NDArray[np.int64], logits: torch.Tensor, position: int
    ) -> npt.NDArray[np.int64]:
        """Return the token at `position` of what each row in `rows` asked for, given their float32
        logits.
        """
        if self._on_cpu:
            return self._choose_on_cpu(rows, logits.numpy(), position)
        temperature = torch.from_numpy(self._temperature_R[rows]).to(logits.device)
        seeds, positions = self._seeds_R[rows], self._first_R[rows] + np.uint64(position)
        chosen, _ = device_sampling.winners(logits, seeds.tolist(), positions.tolist(), temperature)
        choice: npt.NDArray[np.int64] = chosen.cpu().numpy()
        return choice

    def _choose_on_cpu(
        self, rows: npt.NDArray[np.int64], logits_RV: npt.NDArray[np.float32], position: int
    ) -> npt.NDArray[np.int64]:
        temperature_R = self._temperature_R[rows]
        if self._block is not None:
            return sampling.choose(logits_RV, self._block[rows, position], temperature_R)
        positions = self._first_R[rows] + np.uint64(position)
        return sampling.winners(logits_RV, self._seeds_R[rows], positions, temperature_R)[0]
