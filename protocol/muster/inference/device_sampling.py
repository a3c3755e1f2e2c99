"""Verifiable sampling on an accelerator: `muster.inference.sampling` and `replaying` in torch.

Runs on whatever device the logits are on, a CPU included. The hashes are identical integers; the
noise agrees with numpy's to the last bit or one beside it, as far as two libraries' logarithms do.
Axes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

BLOCK_ELEMENTS = 1 << 22
"""Scores computed per pass: bounds the int64 and float64 intermediates to about 128 MiB."""

_MASK = 0xFFFFFFFF


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] float32 noise, row by row as `muster.inference.sampling.gumbel_noise`."""
    return _to_gumbel(token_hashes(seeds, positions, vocab, device=device))


def token_hashes(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, *, device: torch.device | str
) -> torch.Tensor:
    """Return [R, V] the 32-bit integers that the noise is made of, as int64."""
    ids_V = torch.arange(vocab, dtype=torch.int64, device=device)
    return _hash(ids_V, *_keys(seeds, positions, device))


def choose(
    logits_RV: torch.Tensor, noise_RV: torch.Tensor, temperature_R: torch.Tensor
) -> torch.Tensor:
    """Return per row the smallest id that maximises `logit / T + g` in float32."""
    # torch.argmax returns the first of equal maxima.
    return (logits_RV.float() / temperature_R[:, None] + noise_RV).argmax(dim=1)


def winners(
    logits_RV: torch.Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    temperature_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `choose` under the rows' own noise, and the score of each choice, block by block."""
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    scores_R = torch.empty(len(logits_RV), dtype=torch.float32, device=logits_RV.device)
    vocab = logits_RV.shape[1]
    for rows in _blocks(*logits_RV.shape):
        noise = gumbel_noise(seeds[rows], positions[rows], vocab, device=logits_RV.device)
        scores = noise.add_(logits_RV[rows].float() / temperature_R[rows, None])
        ids_R[rows] = scores.argmax(dim=1)
        scores_R[rows] = scores.gather(1, ids_R[rows, None])[:, 0]
    return ids_R, scores_R


def replay_rows(
    logits_RV: torch.Tensor,
    tokens: Sequence[int],
    seeds: Sequence[int],
    positions: Sequence[int],
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return margins [R] and expected ids [R], as `muster.inference.replaying.replay` does."""
    device, vocab = logits_RV.device, logits_RV.shape[1]
    temperature_R = torch.full((len(logits_RV),), temperature, device=device)
    expected_R, best_R = winners(logits_RV, seeds, positions, temperature_R)
    # Claimed ids may be any integers, also ones that no tensor holds.
    is_known_R = torch.tensor([0 <= t < vocab for t in tokens], device=device)
    known = torch.tensor([t if 0 <= t < vocab else 0 for t in tokens], device=device)
    noise_R = _to_gumbel(_hash(known[:, None], *_keys(seeds, positions, device)))[:, 0]
    logit_R = logits_RV.gather(1, known[:, None])[:, 0].float()
    margins_R = best_R - (logit_R / temperature_R + noise_R)
    is_finite_R = is_known_R & margins_R.isfinite()
    return margins_R.where(is_finite_R, torch.inf), expected_R


def _blocks(rows: int, vocab: int) -> Iterator[slice]:
    size = max(1, BLOCK_ELEMENTS // vocab)
    for start in range(0, rows, size):
        yield slice(start, start + size)


def _keys(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    low = torch.tensor([seed & _MASK for seed in seeds], dtype=torch.int64, device=device)
    high = torch.tensor([seed >> 32 for seed in seeds], dtype=torch.int64, device=device)
    position = torch.tensor(list(positions), dtype=torch.int64, device=device)
    first = _mix(_mix(low) ^ high)
    second = _mix(_mix(high ^ 0x9E3779B9) ^ low)
    return _mix(first ^ position), _mix((second + position * 0x85EBCA6B) & _MASK)


def _hash(ids: torch.Tensor, k0_R: torch.Tensor, k1_R: torch.Tensor) -> torch.Tensor:
    return _mix((_mix(ids ^ k0_R[:, None]) + k1_R[:, None]) & _MASK)


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
