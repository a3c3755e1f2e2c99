"""Examines samples where torch computes: on a CPU with numpy, else on the device itself.

Only findings leave a device: margins, ids and flags of the replay, and the entries of hidden states
that proofs are compared with (`device_proofs`). Axes: as in `muster.inference.examining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from muster.inference.device_proofs import project, verify_proofs
from muster.inference.engine import Examined, Replayed, Sample
from muster.inference.examining import (
    Block,
    Choices,
    HostBlock,
    Odds,
    Proven,
    examine,
    prove_host,
)
from muster.inference.sampler import device_token_noise, device_winners
from muster.protocol.recipe import ProofRecipe
from muster.toploc.chunks import to_patterns

DEVICE_BLOCK_BYTES = 256 << 20
"""Bytes of float32 logits of one block on an accelerator, where small blocks need more launches."""


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A Block on a device; the noise is computed there, some rows at a time."""

    logits_BV: torch.Tensor

    def replay(self, choices: Choices, temperature: float) -> Replayed:
        """Return the rows' choices compared with those that the noise yields."""
        logits_BV, device = self.logits_BV, self.logits_BV.device
        tokens_B = torch.from_numpy(choices.tokens_B).to(device)
        temperature_B = np.full(len(logits_BV), temperature, np.float32)
        seeds, positions = choices.seeds_B, choices.positions_B
        expected_B, best_B = device_winners(logits_BV, seeds, positions, temperature_B)
        chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
        scale = torch.tensor(np.float32(temperature), device=device)
        claimed_B = chosen_B / scale + device_token_noise(seeds, positions, tokens_B)
        margins_B = best_B - claimed_B
        margins_B = torch.where(margins_B.isfinite(), margins_B, torch.inf)
        likelier_B = chosen_B > logits_BV.gather(1, expected_B[:, None])[:, 0]
        found = (margins_B, expected_B, likelier_B)
        return Replayed(*(column.cpu().numpy() for column in found))

    def ends(self, eos: Sequence[int], temperature: float) -> Odds:
        """Return the probability [B] of an EOS."""
        odds_BV = (self.logits_BV.double() / temperature).softmax(dim=1)
        odds: Odds = odds_BV[:, list(eos)].sum(dim=1).cpu().numpy()
        return odds


def block_of(logits_BV: torch.Tensor) -> Block:
    """Return a Block of logits [B, V] of any format that replays them on their device."""
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
    """Return the findings about samples, given their hidden states [T, H]; `logits_of` computes
    logits [B, V] from hidden states [B, H]. Call under `torch.inference_mode`.
    """
    if not samples:
        return []
    hidden_NH = hidden[0] if len(hidden) == 1 else torch.cat(list(hidden))
    is_cpu = hidden_NH.device.type == "cpu"
    return examine(
        samples,
        _prove(samples, hidden, proof),
        lambda rows: block_of(logits_of(hidden_NH[rows])),
        vocab_size=vocab_size,
        eos=eos,
        temperature=temperature,
        block_bytes=None if is_cpu else DEVICE_BLOCK_BYTES,
    )


def _prove(samples: Sequence[Sample], hidden: Sequence[torch.Tensor], proof: ProofRecipe) -> Proven:
    if hidden[0].device.type == "cpu":
        return prove_host(samples, [to_patterns(hidden_TH) for hidden_TH in hidden], proof)
    return prove_device(samples, hidden, proof)


def prove_device(
    samples: Sequence[Sample], hidden: Sequence[torch.Tensor], proof: ProofRecipe
) -> Proven:
    """Return what `prove_host` does for hidden states on a device, computed there."""
    pairs = list(zip(samples, hidden, strict=True))
    return Proven(
        [verify_proofs(hidden_TH, sample.proofs, proof) for sample, hidden_TH in pairs],
        [project(hidden_TH, sample.shares) for sample, hidden_TH in pairs],
    )
