"""Chooses the tokens of the rows that are being generated, on whatever device their logits are.

On a CPU the noise of small vocabularies is made for some positions ahead: a call costs more than
the few values it would make. Axes: Q requests, R of which are asked about, A positions ahead, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from muster.inference import device_sampling, sampling
from muster.inference.engine import Request

_AHEAD_ELEMENTS = 1 << 20
"""Noise values held in advance: 4 MiB; where not two positions of all requests fit, none are."""

_MOST_AHEAD = 16


class Sampler:
    """The choices of one `generate`."""

    def __init__(self, requests: Sequence[Request], vocab: int, device: torch.device) -> None:
        self._seeds_Q = np.array([r.seed for r in requests], np.uint64)
        self._temperature_Q = np.array([r.temperature for r in requests], np.float32)
        self._start_Q = np.array([r.position for r in requests], np.uint64)
        self._vocab = vocab
        self._on_cpu = device.type == "cpu"
        longest = max(r.max_new_tokens for r in requests)
        ahead = min(_MOST_AHEAD, longest, _AHEAD_ELEMENTS // (len(requests) * vocab))
        self._noise_QAV = np.empty((len(requests), ahead if ahead > 1 else 0, vocab), np.float32)
        # Before any position, so that nothing counts as made.
        self._first_Q = np.full(len(requests), -1 - self._noise_QAV.shape[1])

    def choose(
        self,
        rows: npt.NDArray[np.int64],
        logits: torch.Tensor,
        positions_R: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Return the next token of every request in `rows`, of which it has so many so far, given
        float32 logits.
        """
        if self._on_cpu:
            return self._choose_on_cpu(rows, logits.numpy(), positions_R)
        temperature = torch.from_numpy(self._temperature_Q[rows]).to(logits.device)
        seeds, positions = self._seeds_Q[rows], self._start_Q[rows] + positions_R.astype(np.uint64)
        chosen, _ = device_sampling.winners(logits, seeds.tolist(), positions.tolist(), temperature)
        choice: npt.NDArray[np.int64] = chosen.cpu().numpy()
        return choice

    def _choose_on_cpu(
        self,
        rows: npt.NDArray[np.int64],
        logits_RV: npt.NDArray[np.float32],
        positions_R: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        temperature_R = self._temperature_Q[rows]
        ahead = self._noise_QAV.shape[1]
        if not ahead:
            positions = self._start_Q[rows] + positions_R.astype(np.uint64)
            return sampling.winners(logits_RV, self._seeds_Q[rows], positions, temperature_R)[0]
        offset_R = positions_R - self._first_Q[rows]
        is_spent_R = offset_R >= ahead
        if is_spent_R.any():
            self._look_ahead(rows[is_spent_R], positions_R[is_spent_R])
            offset_R[is_spent_R] = 0
        return sampling.choose(logits_RV, self._noise_QAV[rows, offset_R], temperature_R)

    def _look_ahead(self, rows: npt.NDArray[np.int64], positions_R: npt.NDArray[np.int64]) -> None:
        firsts = self._start_Q[rows] + positions_R.astype(np.uint64)
        self._noise_QAV[rows] = sampling.noise_block(
            self._seeds_Q[rows], firsts, self._noise_QAV.shape[1], self._vocab
        )
        self._first_Q[rows] = positions_R
