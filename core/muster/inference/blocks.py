"""Examining samples where torch computes: on a CPU in numpy's kernels, else on the device itself.

Only findings leave a device: margins, ids and bits of the replay, and the hidden states as
bfloat16 patterns, two bytes a value, for the proofs. Axes: as in `muster.inference.examining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from muster.inference import sampling
from muster.inference.engine import Examined, Replayed, Sample
from muster.inference.examining import Block, Choices, HostBlock, Odds, examine
from muster.inference.sampler import DEVICE_ELEMENTS, device_noise
from muster.protocol.recipe import ProofRecipe
from muster.toploc.chunks import to_patterns


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A Block on a device; the noise is made there, some rows at a time."""

    logits_BV: torch.Tensor

    def replay(self, choices: Choices, temperature: float) -> Replayed:
        """Return the rows' choices against those that the noise yields."""
        parts = sampling.blocks(len(self.logits_BV), self.logits_BV.shape[1], DEVICE_ELEMENTS)
        replayed = [_replay(self.logits_BV[rows], choices.at(rows), temperature) for rows in parts]
        columns = (torch.cat(column).cpu().numpy() for column in zip(*replayed, strict=True))
        return Replayed(*columns)

    def ends(self, eos: Sequence[int], temperature: float) -> Odds:
        """Return [B] the probability of an EOS."""
        odds_BV = (self.logits_BV.double() / temperature).softmax(dim=1)
        odds: Odds = odds_BV[:, list(eos)].sum(dim=1).cpu().numpy()
        return odds


def _replay(
    logits_BV: torch.Tensor, choices: Choices, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, vocab = logits_BV.device, logits_BV.shape[1]
    tokens_B1 = torch.from_numpy(choices.tokens_B).to(device)[:, None]
    seeds, positions = choices.seeds_B.tolist(), choices.positions_B.tolist()
    scale = torch.tensor(np.float32(temperature), device=device)
    scores_BV = device_noise(seeds, positions, vocab, device=device).add_(logits_BV / scale)
    best_B, expected_B = scores_BV.max(dim=1)
    margins_B = best_B - scores_BV.gather(1, tokens_B1)[:, 0]
    margins_B = torch.where(margins_B.isfinite(), margins_B, torch.inf)
    likelier_B1 = logits_BV.gather(1, tokens_B1) > logits_BV.gather(1, expected_B[:, None])
    return margins_B, expected_B, likelier_B1[:, 0]


def block_of(logits_BV: torch.Tensor) -> Block:
    """Return logits [B, V] of any format as what replays them where they are."""
    exact = logits_BV.float()
    return HostBlock(exact.numpy()) if exact.device.type == "cpu" else DeviceBlock(exact)


def examine_rows(
    samples: Sequence[Sample],
    hidden: Sequence[torch.Tensor],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    vocab_size: int,
    eos: Iterable[int],
    proof: ProofRecipe,
    temperature: float,
) -> list[Examined]:
    """Return what is found in samples, given their hidden states [T, H] and what makes logits
    [B, V] of hidden states [B, H]; call under `torch.inference_mode`.
    """
    if not samples:
        return []
    hidden_NH = hidden[0] if len(hidden) == 1 else torch.cat(list(hidden))
    return examine(
        samples,
        [to_patterns(hidden_TH) for hidden_TH in hidden],
        lambda rows: block_of(logits_of(hidden_NH[rows])),
        vocab_size=vocab_size,
        eos=eos,
        proof=proof,
        temperature=temperature,
    )
