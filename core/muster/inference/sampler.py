"""Chooses the tokens of the rows that are being generated, on whatever device their logits are.

On an accelerator torch does the arithmetic of `muster.inference.sampling`. The hashes are identical
integers. The noise equals numpy's or differs in the last bit, as the logarithms of the two
libraries do. Axes: R rows that need a token, V vocabulary.
"""

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from muster.inference import sampling
from muster.inference.sampling import Integers

logger = logging.getLogger(__name__)

DEVICE_ELEMENTS = 1 << 22
"""Scores computed per pass: this keeps the float64 intermediates at about 64 MiB."""

# As int32 numbers, whose products wrap modulo 2^32.
_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - 2**32


def choices(
    logits_RV: torch.Tensor,
    seeds: Integers,
    positions: Integers,
    temperature_R: npt.NDArray[np.float32],
) -> torch.Tensor:
    """Return the ids [R] of `muster.inference.sampling.winners`, on the logits' device."""
    if logits_RV.device.type == "cpu":
        exact_RV = logits_RV.float().numpy()
        ids_R, _ = sampling.winners(exact_RV, seeds, positions, temperature_R)
        return torch.from_numpy(ids_R)
    return device_winners(logits_RV, seeds, positions, temperature_R)[0]


# ------------------------------------------------------------------------- on an accelerator


def device_winners(
    logits_RV: torch.Tensor,
    seeds: Integers,
    positions: Integers,
    temperature_R: npt.NDArray[np.float32],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and scores [R] of `muster.inference.sampling.winners`, on the logits' device;
    the smallest id wins a tie.
    """
    device = logits_RV.device
    temperature = torch.from_numpy(temperature_R).to(device, non_blocking=True)
    return keyed_winners(logits_RV, keys_on(seeds, positions, device), temperature)


def keyed_winners(
    logits_RV: torch.Tensor, keys_2R: torch.Tensor, temperature_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `device_winners` does, given the words of `keys_on`."""
    fused = _fused(logits_RV.device)
    if fused is not None and logits_RV.stride(1) == 1:
        return fused(logits_RV, keys_2R.contiguous(), temperature_R)
    return _winners_by_passes(logits_RV, keys_2R, temperature_R)


def keys_on(seeds: Integers, positions: Integers, device: torch.device | str) -> torch.Tensor:
    """Return the words [2, R] that the rows' hashes start from, in one upload."""
    keys_2R = np.stack(sampling.row_keys(seeds, positions)).view(np.int32)
    return torch.from_numpy(keys_2R).to(device, non_blocking=True)


def _winners_by_passes(
    logits_RV: torch.Tensor, keys_2R: torch.Tensor, temperature_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    vocab, ids, best = logits_RV.shape[1], [], []
    for rows in sampling.blocks(len(logits_RV), vocab, DEVICE_ELEMENTS):
        scores = _to_gumbel(_hash(keys_2R[:, rows], vocab))
        scores.add_(logits_RV[rows].float() / temperature_R[rows, None])
        scores_R, ids_R = scores.max(dim=1)
        ids.append(ids_R)
        best.append(scores_R)
    return torch.cat(ids), torch.cat(best)


def keyed_noise(keys_2R: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """Return [R] the noise of one token per row, see `muster.inference.sampling.token_noise`."""
    words_R = _mix_in_place(tokens_R.to(torch.int32) ^ keys_2R[0])
    return _to_gumbel(_mix_in_place(words_R.add_(keys_2R[1])))


_Winners = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@cache
def _fused(device: torch.device) -> _Winners | None:
    """Return the fused kernel; None if there is none, or if it differs from torch's arithmetic."""
    if device.type != "cuda":
        return None
    try:
        from muster.inference.fused_choices import winners

        return winners if is_same(winners, device) else None
    except Exception as failure:  # A kernel's compiler may raise anything; torch works without.
        logger.warning("tokens are chosen without a fused kernel: %s", failure)
        return None


def is_same(winners: _Winners, device: torch.device) -> bool:
    """Return whether a kernel chooses as torch does: the same ids and the same bits of scores, for
    flat, ordinary and peaked rows and one with NaN.
    """
    spread_R1 = torch.tensor([[0.0], [1.0], [8.0], [1.0]])
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * spread_R1
    logits[3, 1234] = torch.nan
    keys_2R = keys_on([1, 2**40, 3, 4], [0, 1, 2**20, 3], device)
    asked = logits.to(device), keys_2R, torch.tensor([1.0, 0.5, 1.0, 0.7], device=device)
    ours, theirs = winners(*asked), _winners_by_passes(*asked)
    same = torch.equal(ours[0], theirs[0]) and torch.allclose(
        ours[1], theirs[1], rtol=0, atol=0, equal_nan=True
    )
    if not same:
        logger.warning("the fused kernel chooses other tokens: %s", (ours, theirs))
    return same


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
