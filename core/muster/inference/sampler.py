"""Chooses the tokens of the rows that are being generated, on whatever device their logits are.

On a CPU the noise of small vocabularies is made for some positions ahead: a call costs more than
the few values it would make. On an accelerator torch does the arithmetic of
`muster.inference.sampling`: the hashes are identical integers; the noise agrees with numpy's to the
last bit or one beside it, as far as two libraries' logarithms do. Axes: Q requests, R of which are
asked about, A positions ahead, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from muster.inference import sampling
from muster.inference.engine import Request

_AHEAD_ELEMENTS = 1 << 20
"""Noise values held in advance: 4 MiB; where not two positions of all requests fit, none are."""

_MOST_AHEAD = 16

DEVICE_ELEMENTS = 1 << 22
"""Scores computed per pass: bounds the int64 and float64 intermediates to about 128 MiB."""

_MASK = 0xFFFFFFFF


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
        chosen = device_choices(logits, seeds.tolist(), positions.tolist(), temperature)
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


# ------------------------------------------------------------------------- on an accelerator


def device_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] float32 noise, row by row as `muster.inference.sampling.gumbel_noise`."""
    return _to_gumbel(device_hashes(seeds, positions, vocab, device=device))


def device_hashes(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] the 32-bit integers that the noise is made of, as int64."""
    ids_V = torch.arange(vocab, dtype=torch.int64, device=device)
    k0_R, k1_R = _keys(seeds, positions, device)
    return _mix((_mix(ids_V ^ k0_R[:, None]) + k1_R[:, None]) & _MASK)


def device_choices(
    logits_RV: torch.Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    temperature_R: torch.Tensor,
) -> torch.Tensor:
    """Return the choices [R] of `muster.inference.sampling.winners`; the smallest id wins a tie."""
    device, vocab = logits_RV.device, logits_RV.shape[1]
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64, device=device)
    for rows in sampling.blocks(len(logits_RV), vocab, DEVICE_ELEMENTS):
        noise = device_noise(seeds[rows], positions[rows], vocab, device=device)
        ids_R[rows] = noise.add_(logits_RV[rows].float() / temperature_R[rows, None]).argmax(dim=1)
    return ids_R


def _keys(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    low = torch.tensor([seed & _MASK for seed in seeds], dtype=torch.int64, device=device)
    high = torch.tensor([seed >> 32 for seed in seeds], dtype=torch.int64, device=device)
    position = torch.tensor(list(positions), dtype=torch.int64, device=device)
    first = _mix(_mix(low) ^ high)
    second = _mix(_mix(high ^ 0x9E3779B9) ^ low)
    return _mix(first ^ position), _mix((second + position * 0x85EBCA6B) & _MASK)


def _mix(x: torch.Tensor) -> torch.Tensor:
    # int64 products overflow modulo 2^64, which leaves their low 32 bits right.
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _to_gumbel(hashes: torch.Tensor) -> torch.Tensor:
    uniform = (hashes.to(torch.float64) + 0.5) / 2**32
    return -torch.log(-torch.log(uniform)).to(torch.float32)
