"""A device compared with this CPU on the same numbers: choices, replays and proofs.

* noise, `gpu_noise_wrong_ids`: number of rows, of 10^6, whose choice differs; logits are flat,
  ordinary, wide and peaked, and some rows have Qwen3's vocabulary. Scores may differ in a last bit,
  as two libraries' logarithms do: the detail counts them. `gpu_choice_us`: microseconds to choose
  one of 151,936 tokens.
* replay, `gpu_replay_wrong_ids`, `gpu_replay_margin_error`: claimed tokens of the same logits,
  replayed on both; half of the claims are right.
* toploc, `gpu_toploc_differing`: proofs and comparisons of the same hidden states that differ.

On a CPU the device's code runs there beside the CPU's own.
"""

import numpy as np
import torch
from benchmarks.gpu.setup import Figures, Setup
from benchmarks.inference.decoding import KINDS

from muster import toploc
from muster.inference import device_proofs, sampling
from muster.inference.blocks import DeviceBlock, DeviceChoices
from muster.inference.engine import Share
from muster.inference.examining import ClaimedTokens, HostBlock
from muster.inference.sampler import _fused, device_winners
from muster.protocol.encoding import keccak
from muster.protocol.ids import Hash32
from muster.protocol.recipe import ProofRecipe
from muster.toploc.chunks import to_patterns
from muster.toploc.projections import project_rows

VOCAB, NARROW = 151_936, 1_024
DRAWS, ROWS = 1_000_000, 4_096
"""Number of compared choices, and choices per call."""
TEMPERATURE = 0.7
PROOF = ProofRecipe()


def logits_of(rows: int, vocab: int, kind: str, seed: int) -> torch.Tensor:
    """Return float32 logits [rows, vocab] of a kind."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * KINDS[kind]


class Compared:
    """Counts of choices, and of those that differ between the two sides."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.draws = self.wrong = self.other_bits = 0

    def add(self, logits: torch.Tensor, first: int) -> None:
        """Choose a token of every row; seeds begin at `first`."""
        rows = len(logits)
        seeds = np.arange(first, first + rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        positions = np.arange(rows, dtype=np.uint64) % np.uint64(40_000)
        warmth = np.full(rows, TEMPERATURE, np.float32)
        ids, scores = sampling.winners(logits.numpy(), seeds, positions, warmth)
        on_device = device_winners(logits.to(self._device), seeds, positions, warmth)
        other_ids, other_scores = (each.cpu().numpy() for each in on_device)
        self.draws += rows
        self.wrong += int((ids != other_ids).sum())
        self.other_bits += int((scores.view(np.int32) != other_scores.view(np.int32)).sum())


def measure_noise(setup: Setup) -> Figures:
    """Compare choices, and measure how long the device takes for one."""
    draws, rows = setup.pick(400, DRAWS), setup.pick(50, ROWS)
    wide = setup.pick(2, ROWS)
    found: dict[str, dict[str, int]] = {}
    total = Compared(setup.device)
    for turn, kind in enumerate(KINDS):
        own = Compared(setup.device)
        for part in (
            *(logits_of(rows, NARROW, kind, i) for i in range(-(-draws // len(KINDS) // rows))),
            *(logits_of(min(wide, 256), VOCAB, kind, 1000 + i) for i in range(-(-wide // 256))),
        ):
            own.add(part, turn * draws + own.draws)
        found[kind] = {"draws": own.draws, "wrong": own.wrong, "other_bits": own.other_bits}
        total.draws, total.wrong = total.draws + own.draws, total.wrong + own.wrong
    metrics = {
        "gpu_noise_wrong_ids": float(total.wrong),
        "gpu_noise_draws": float(total.draws),
        "gpu_choice_us": choice_us(setup),
    }
    return metrics, {**found, "fused": _fused(torch.device(setup.device)) is not None}


def choice_us(setup: Setup, calls: int = 20) -> float:
    """Return the microseconds of one row's choice when many rows are chosen at a time."""
    rows = setup.pick(2, 256)
    logits = logits_of(rows, VOCAB, "ordinary", 0).to(setup.device)
    warmth = np.ones(rows, np.float32)
    device_winners(logits, range(rows), range(rows), warmth)
    began = setup.now()
    for turn in range(setup.pick(2, calls)):
        device_winners(logits, range(rows), [turn] * rows, warmth)
    return 1e6 * (setup.now() - began) / rows / setup.pick(2, calls)


def measure_replay(setup: Setup) -> Figures:
    """Compare both sides' replays of claimed tokens on the same logits."""
    rows, wrong, errors, likelier = setup.pick(4, 512), 0, [0.0], 0
    for turn, kind in enumerate(KINDS):
        logits = logits_of(rows, VOCAB, kind, turn)
        seeds = np.arange(rows, dtype=np.uint64) + np.uint64(2**60)
        positions = np.arange(rows, dtype=np.uint64)
        right, _ = sampling.winners(
            logits.numpy(), seeds, positions, np.full(rows, TEMPERATURE, np.float32)
        )
        claimed = np.where(np.arange(rows) % 2, right, (right + 1) % VOCAB)
        choices = ClaimedTokens(claimed.astype(np.int64), seeds, positions)
        own = HostBlock(logits.numpy()).replay(choices, TEMPERATURE)
        device = torch.device(setup.device)
        asked = DeviceChoices.of(choices, device)
        other = DeviceBlock(logits.to(device)).replay(asked, TEMPERATURE)
        device_proofs.arrive(device)
        wrong += int((own.expected_T != other.expected_T).sum())
        likelier += int((own.is_likelier_T != other.is_likelier_T).sum())
        errors.append(float(np.abs(own.margins_T - other.margins_T).max()))
    metrics = {"gpu_replay_wrong_ids": float(wrong), "gpu_replay_margin_error": max(errors)}
    return metrics, {"rows": rows * len(KINDS), "other_likelier": likelier}


def measure_toploc(setup: Setup) -> Figures:
    """Compare proofs, comparisons and fingerprints; measure the device's time for a proof."""
    tokens, width = setup.pick(70, 4_100), setup.pick(64, 1_024)
    rows = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    near = (rows.float() * 1.01).bfloat16()
    there, how = rows.to(setup.device), {"chunk_tokens": PROOF.chunk_tokens, "topk": PROOF.topk}
    proofs = toploc.build_proofs(rows, **how)
    share = Share(Hash32(keccak(b"gpu")), 0, tokens)
    built = device_proofs._built([there], PROOF)[0]
    same = [
        built == proofs,
        device_proofs.start_verifying([near.to(setup.device)], [proofs], PROOF)()[0]
        == toploc.verify_proofs(near, proofs, **how),
        np.allclose(
            device_proofs.project(there, [share])[0].cpu(),
            project_rows(to_patterns(rows), share.seed, 0, tokens),
        ),
        _grown(there) == proofs,
    ]
    began = setup.now()
    device_proofs._built([there], PROOF)
    metrics = {
        "gpu_toploc_differing": float(same.count(False)),
        "gpu_proof_us": 1e6 * (setup.now() - began) / len(proofs),
    }
    return metrics, {"chunks": len(proofs), "width": width, "same": same}


def _grown(rows: torch.Tensor) -> list[bytes]:
    """Return the proofs of rows that come sixteen at a time, as while tokens are generated."""
    one = np.zeros(1, np.int64)
    with device_proofs.DeviceBuilder(chunk_tokens=PROOF.chunk_tokens, topk=PROOF.topk) as builder:
        for part in torch.split(rows, 16):
            builder.extend(one, part[None])
        builder.end(one)
        return builder.take(0)
