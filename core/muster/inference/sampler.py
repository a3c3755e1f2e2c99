"""Chooses the tokens of the rows that are being generated, on whatever device their logits are.

On an accelerator torch does the arithmetic of `muster.inference.sampling`: the hashes are identical
integers; the noise agrees with numpy's to the last bit or one beside it, as far as two libraries'
logarithms do. Axes: Q requests, R rows that are asked about, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from muster.inference import sampling
from muster.inference.engine import Request
from muster.inference.sampling import Integers

DEVICE_ELEMENTS = 1 << 22
"""Scores computed per pass: bounds the float64 intermediates to about 64 MiB."""

# As int32, whose products wrap modulo 2^32.
_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - 2**32


class Sampler:
    """The choices of one `generate`."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._seeds_Q = np.array([r.seed for r in requests], np.uint64)
        self._temperature_Q = np.array([r.temperature for r in requests], np.float32)
        self._start_Q = np.array([r.position for r in requests], np.uint64)

    def choose(
        self,
        rows: npt.NDArray[np.int64],
        logits: torch.Tensor,
        positions_R: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """Return the next token of every request in `rows`, of which it has so many so far, given
        float32 logits.
        """
        positions = self._start_Q[rows] + positions_R.astype(np.uint64)
        chosen_R = choices(logits, self._seeds_Q[rows], positions, self._temperature_Q[rows])
        choice: npt.NDArray[np.int64] = chosen_R.cpu().numpy()
        return choice


def choices(
    logits_RV: torch.Tensor,
    seeds: Integers,
    positions: Integers,
    temperature_R: npt.NDArray[np.float32],
) -> torch.Tensor:
    """Return the ids [R] of `muster.inference.sampling.winners`, where float32 logits are."""
    if logits_RV.device.type == "cpu":
        ids_R, _ = sampling.winners(logits_RV.numpy(), seeds, positions, temperature_R)
        return torch.from_numpy(ids_R)
    return device_choices(logits_RV, seeds, positions, temperature_R)


# ------------------------------------------------------------------------- on an accelerator


def device_noise(
    seeds: Integers, positions: Integers, vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] float32 noise, row by row as `muster.inference.sampling.gumbel_noise`."""
    return _to_gumbel(device_hashes(seeds, positions, vocab, device=device))


def device_hashes(
    seeds: Integers, positions: Integers, vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] the 32-bit integers that the noise is made of, as the bits of int32."""
    return _hash(_keys(seeds, positions, device), vocab)


def device_choices(
    logits_RV: torch.Tensor,
    seeds: Integers,
    positions: Integers,
    temperature_R: npt.NDArray[np.float32],
) -> torch.Tensor:
    """Return the choices [R] of `muster.inference.sampling.winners`; the smallest id wins a tie."""
    device, vocab = logits_RV.device, logits_RV.shape[1]
    keys_2R = _keys(seeds, positions, device)
    temperature_R1 = torch.from_numpy(temperature_R).to(device)[:, None]
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64, device=device)
    for rows in sampling.blocks(len(logits_RV), vocab, DEVICE_ELEMENTS):
        scores = _to_gumbel(_hash(keys_2R[:, rows], vocab))
        ids_R[rows] = scores.add_(logits_RV[rows].float() / temperature_R1[rows]).argmax(dim=1)
    return ids_R


def _keys(seeds: Integers, positions: Integers, device: torch.device | str) -> torch.Tensor:
    """Return [2, R] what rows' hashes start from, of all rows in one upload."""
    keys_2R = np.stack(sampling.row_keys(seeds, positions)).view(np.int32)
    return torch.from_numpy(keys_2R).to(device)


def _hash(keys_2R: torch.Tensor, vocab: int) -> torch.Tensor:
    ids_V = torch.arange(vocab, dtype=torch.int32, device=keys_2R.device)
    words_RV = _mix_in_place(ids_V ^ keys_2R[0, :, None])
    return _mix_in_place(words_RV.add_(keys_2R[1, :, None]))


def _mix_in_place(x: torch.Tensor) -> torch.Tensor:
    # Shifts of int32 copy the sign into the high bits: the masks clear them.
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(_FIRST_FACTOR)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_SECOND_FACTOR)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _to_gumbel(hashes: torch.Tensor) -> torch.Tensor:
    uniform = hashes.to(torch.float64)
    uniform += (uniform < 0) * 2.0**32
    uniform.add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
