"""Examines samples where torch computes: on a CPU with numpy, else on the device itself.

Only findings leave a device: margins, ids and flags of the replay, and the entries of hidden states
that proofs are compared with (`device_proofs`). Axes: as in `muster.inference.examining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from muster.inference.device_proofs import (
    arrive,
    leaving,
    project,
    sent,
    start_signing,
    start_verifying,
)
from muster.inference.engine import Examined, Replayed, Sample
from muster.inference.examining import (
    Block,
    ClaimedTokens,
    HostBlock,
    Odds,
    ProofFindings,
    examine,
    prove_host,
)
from muster.inference.sampler import keyed_noise, keyed_winners, keys_on
from muster.protocol.recipe import ProofRecipe
from muster.toploc.chunks import to_patterns

DEVICE_BLOCK_BYTES = 512 << 20
"""Bytes of float32 logits of one block on an accelerator, where small blocks need more launches;
half of that in a format of 16 bits."""


class DeviceChoices(NamedTuple):
    """Choices on a device."""

    tokens_B: torch.Tensor
    keys_2B: torch.Tensor
    """The words that the rows' hashes start from."""
    noise_B: torch.Tensor
    """The tokens' noise."""

    @classmethod
    def of(cls, choices: ClaimedTokens, device: torch.device) -> DeviceChoices:
        """Send choices to a device, and compute their noise there."""
        keys_2B = keys_on(choices.seeds_B, choices.positions_B, device)
        tokens_B = sent(choices.tokens_B, device)
        return cls(tokens_B, keys_2B, keyed_noise(keys_2B, tokens_B))

    def at(self, rows: slice) -> DeviceChoices:
        """Return the choices of some rows."""
        return DeviceChoices(self.tokens_B[rows], self.keys_2B[:, rows], self.noise_B[rows])


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A Block on a device, of any format; the noise is computed there, some rows at a time."""

    logits_BV: torch.Tensor

    def replay(self, choices: DeviceChoices, temperature: float) -> Replayed:
        """Return the rows' choices compared with those that the noise yields."""
        logits_BV, tokens_B = self.logits_BV, choices.tokens_B
        warmth_B = torch.full(tokens_B.shape, temperature, device=logits_BV.device)
        expected_B, best_B = keyed_winners(logits_BV, choices.keys_2B, warmth_B)
        chosen_B, likely_B = (
            logits_BV.gather(1, ids_B[:, None])[:, 0].float() for ids_B in (tokens_B, expected_B)
        )
        margins_B = best_B - (chosen_B / warmth_B + choices.noise_B)
        margins_B.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        return Replayed(leaving(margins_B), leaving(expected_B), leaving(chosen_B > likely_B))

    def ends(self, eos: Sequence[int], temperature: float) -> Odds:
        """Return the probability [B] of an EOS."""
        odds_BV = (self.logits_BV.double() / temperature).softmax(dim=1)
        return leaving(odds_BV[:, list(eos)].sum(dim=1))


def block_of(logits_BV: torch.Tensor) -> Block:
    """Return a Block of logits [B, V] of any format that replays them on their device."""
    if _is_host(logits_BV):
        return HostBlock(logits_BV.float().numpy())
    return DeviceBlock(logits_BV)


def _is_host(values: torch.Tensor) -> bool:
    return values.device.type == "cpu"


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
    is_host = _is_host(hidden_NH)
    prove = _prove_at_once if is_host else _prove_device
    return examine(
        samples,
        prove(samples, hidden, proof),
        lambda rows: block_of(logits_of(hidden_NH[rows])),
        None if is_host else partial(DeviceChoices.of, device=hidden_NH.device),
        vocab_size=vocab_size,
        eos=eos,
        temperature=temperature,
        block_bytes=None if is_host else DEVICE_BLOCK_BYTES,
    )


def _prove_at_once(
    samples: Sequence[Sample], hidden: Sequence[torch.Tensor], proof: ProofRecipe
) -> Callable[[], ProofFindings]:
    proven = prove_host(samples, [to_patterns(hidden_TH) for hidden_TH in hidden], proof)
    return lambda: proven


def _prove_device(
    samples: Sequence[Sample], hidden: Sequence[torch.Tensor], proof: ProofRecipe
) -> Callable[[], ProofFindings]:
    """Return a function that returns what `prove_host` does for hidden states on a device, computed
    there, once the device has done all it was told.
    """
    await_signs = start_signing(share for each in samples for share in each.shares)
    results = start_verifying(hidden, [each.proofs for each in samples], proof)

    def proven() -> ProofFindings:
        await_signs()
        projected = [
            leaving(project(hidden_TH, each.shares))
            for each, hidden_TH in zip(samples, hidden, strict=True)
        ]
        chunks = results()
        arrive(hidden[0].device)
        return ProofFindings(chunks, projected)

    return proven
