"""Verifiable sampling on an accelerator: `muster.inference.sampling` in torch.

The hashes are identical integers; the noise agrees with numpy's to the last bit or one beside it,
as far as two libraries' logarithms do. Axes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] float32 noise, row by row as `muster.inference.sampling.gumbel_noise`."""
    uniform = (token_hashes(seeds, positions, vocab, device=device).to(torch.float64) + 0.5) / 2**32
    return -torch.log(-torch.log(uniform)).to(torch.float32)


def token_hashes(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] the 32-bit integers that the noise is made of, as int64."""
    low = torch.tensor([seed & _MASK for seed in seeds], dtype=torch.int64, device=device)
    high = torch.tensor([seed >> 32 for seed in seeds], dtype=torch.int64, device=device)
    position = torch.tensor(list(positions), dtype=torch.int64, device=device)
    first = _mix(_mix(low) ^ high)
    second = _mix(_mix(high ^ 0x9E3779B9) ^ low)
    k0 = _mix(first ^ position)
    k1 = _mix((second + position * 0x85EBCA6B) & _MASK)
    ids = torch.arange(vocab, dtype=torch.int64, device=device)
    return _mix((_mix(ids ^ k0[:, None]) + k1[:, None]) & _MASK)


def choose(
    logits_RV: torch.Tensor, noise_RV: torch.Tensor, temperature_R: torch.Tensor
) -> torch.Tensor:
    """Return per row the smallest id that maximises `logit / T + g` in float32."""
    # torch.argmax returns the first of equal maxima.
    return (logits_RV.float() / temperature_R[:, None] + noise_RV).argmax(dim=1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    # int64 products overflow modulo 2^64, which leaves their low 32 bits right.
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
