"""TOPLOC on the device that computed the hidden states: only what proofs need leaves it.

A proof needs a chunk's largest entries, their places, and the few entries that decoys are chosen
from: about 1 kB of a chunk of 64 kB (32 tokens of width 1,024). The same entries are chosen as on a
CPU, also among equal ones. During generation the rows of an unfinished chunk stay on the device.
The chosen entries are copied to pinned memory; the thread that builds proofs waits for the copy,
the device does not. Axes: B chunks, C rows of a chunk, E elements of a chunk, K points, P pool, S
shares, T rows of a sample, H hidden units.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.engine import Share
from muster.protocol.errors import ProofError
from muster.protocol.recipe import ProofRecipe
from muster.toploc import (
    ChunkResult,
    IncrementalBuilder,
    build_proofs_many,
    projections,
    wire,
)
from muster.toploc.chunks import Chosen, pool_places
from muster.toploc.proofs import prove_chosen, verify_chosen

_SIGNING_THREADS = 4
"""Threads that compute signs of shares: hashing leaves the interpreter to others."""
_PASS_ELEMENTS = 1 << 24
"""Entries ranked at a time: their keys take 128 MiB."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Chosen entries of B chunks of E elements that are being copied from a device."""

    elements: int
    packed_BN: torch.Tensor
    """[B, 2K + P + 1] int32 on the host: places, patterns, the pool's patterns, whether all are
    numbers."""
    points: int
    """K."""
    arrival: Any
    """An event at the end of the copy; None if nothing had to be copied."""

    def arrived(self) -> Chosen:
        """Wait for the copy, and return the chosen entries."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return Chosen(self.elements, self.points, self.packed_BN.numpy())


def select(chunks_BE: torch.Tensor, points: int) -> Leaving:
    """Start to copy from the device what proofs with so many points need of chunks."""
    step = max(1, _PASS_ELEMENTS // chunks_BE.shape[1])
    packed_BN = torch.cat([_packed(part, points) for part in torch.split(chunks_BE, step)])
    arrival = None
    if packed_BN.device.type == "cuda":
        host = torch.empty(packed_BN.shape, dtype=packed_BN.dtype, pin_memory=True)
        packed_BN = host.copy_(packed_BN, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
    return Leaving(chunks_BE.shape[1], packed_BN, points, arrival)


def _packed(chunks_BE: torch.Tensor, points: int) -> torch.Tensor:
    elements, device = chunks_BE.shape[1], chunks_BE.device
    narrow = chunks_BE.to(torch.bfloat16).contiguous().view(torch.int16)
    patterns_BE = narrow.to(torch.int32).bitwise_and_(0xFFFF)
    magnitudes_BE = patterns_BE & 0x7FFF
    # All keys differ; among equal magnitudes the smaller index has the larger key.
    behind_E = torch.arange(elements - 1, -1, -1, dtype=torch.int64, device=device)
    keys_BE = (magnitudes_BE.to(torch.int64) << 32) | behind_E
    places_BK = elements - 1 - (keys_BE.topk(points, dim=1, sorted=False).values & 0xFFFFFFFF)
    pool_P = sent(pool_places(elements), device)
    is_finite_B1 = (magnitudes_BE < 0x7F80).all(dim=1, keepdim=True)
    parts = (places_BK, patterns_BE.gather(1, places_BK), patterns_BE[:, pool_P], is_finite_B1)
    return torch.cat([part.to(torch.int32) for part in parts], dim=1)


# ------------------------------------------------------------------------------ whole samples


class _Alike(NamedTuple):
    """Chunks of one shape, of some samples."""

    shape: wire.ChunkShape
    counts: list[tuple[int, int]]
    """Places of the samples, and how many of the chunks are theirs."""
    chunks_BE: torch.Tensor


def build_proofs(samples: Sequence[torch.Tensor], proof: ProofRecipe) -> list[list[bytes]]:
    """Return the proofs of samples' hidden states [T, H], computed on their device."""
    if all(rows_TH.device.type == "cpu" for rows_TH in samples):
        return build_proofs_many(samples, chunk_tokens=proof.chunk_tokens, topk=proof.topk)
    return _built(samples, proof)


def _built(samples: Sequence[torch.Tensor], proof: ProofRecipe) -> list[list[bytes]]:
    groups = [(each, select(each.chunks_BE, each.shape.points)) for each in _cut(samples, proof)]
    built: list[list[bytes]] = [[] for _ in samples]
    for group, selected in groups:
        made = iter(prove_chosen(selected.arrived()))
        for i, count in group.counts:
            built[i] += islice(made, count)
    return built


def start_verifying(
    samples: Sequence[torch.Tensor], proofs: Sequence[Sequence[bytes]], proof: ProofRecipe
) -> Callable[[], list[list[ChunkResult]]]:
    """Choose on the device what the proofs of samples' hidden states [T, H] are compared with;
    return a function that waits for it and returns the results of `muster.toploc.verify_proofs`.
    """
    for rows_TH, given in zip(samples, proofs, strict=True):
        if len(given) != (expected := -(-len(rows_TH) // proof.chunk_tokens)):
            raise ProofError(f"{len(given)} proofs for {expected} chunks", reason="count")
    groups = [(each, select(each.chunks_BE, each.shape.compared)) for each in _cut(samples, proof)]

    def results() -> list[list[ChunkResult]]:
        found: list[list[ChunkResult]] = [[] for _ in samples]
        for group, selected in groups:
            compared = [
                proofs[i][len(found[i]) : len(found[i]) + count] for i, count in group.counts
            ]
            made = iter(verify_chosen(selected.arrived(), [*chain(*compared)], group.shape))
            for i, count in group.counts:
                found[i] += islice(made, count)
        return found

    return results


def _cut(samples: Sequence[torch.Tensor], proof: ProofRecipe) -> list[_Alike]:
    """Return the chunks of all samples, whole ones first: few large steps keep a device busy."""
    counts: dict[wire.ChunkShape, list[tuple[int, int]]] = {}
    chunks: dict[wire.ChunkShape, list[torch.Tensor]] = {}
    for i, rows_TH in enumerate(samples):
        for chunks_BE, shape in _chunks(rows_TH, proof):
            counts.setdefault(shape, []).append((i, len(chunks_BE)))
            chunks.setdefault(shape, []).append(chunks_BE)
    shapes = sorted(counts, key=lambda shape: shape.elements, reverse=True)
    return [_Alike(shape, counts[shape], torch.cat(chunks[shape])) for shape in shapes]


def _chunks(
    rows_TH: torch.Tensor, proof: ProofRecipe
) -> list[tuple[torch.Tensor, wire.ChunkShape]]:
    """Return the whole chunks [B, E] of a sample, and a shorter last one if there is one."""
    tokens, width = rows_TH.shape
    shapes = wire.chunk_shapes(tokens, width, chunk_tokens=proof.chunk_tokens, topk=proof.topk)
    whole = tokens // proof.chunk_tokens
    parts = []
    if whole:
        rows = rows_TH[: whole * proof.chunk_tokens]
        parts.append((rows.reshape(whole, -1), shapes[0]))
    if tokens % proof.chunk_tokens:
        parts.append((rows_TH[whole * proof.chunk_tokens :].reshape(1, -1), shapes[-1]))
    return parts


def start_signing(shares: Iterable[Share]) -> Callable[[], None]:
    """Start to compute the signs of blocks, no more than are kept at hand; return a function that
    waits for them. A device works meanwhile.
    """
    blocks = list(dict.fromkeys((share.seed, share.tokens) for share in shares))
    pool = ThreadPoolExecutor(_SIGNING_THREADS)
    for seed, tokens in blocks[: projections.BLOCKS_AT_HAND]:
        pool.submit(projections.balanced_signs, seed, tokens)
    return pool.shutdown


def project(rows_TH: torch.Tensor, shares: Sequence[Share]) -> torch.Tensor:
    """Return the contributions [S, VALUES] of a sample's rows to each share's projections, computed
    on the rows' device, where they are left.
    """
    tokens, width = rows_TH.shape
    if not shares:
        return rows_TH.new_empty(0, projections.VALUES, dtype=torch.float64)
    signs = [
        projections.balanced_signs(share.seed, share.tokens)[:, share.first : share.first + tokens]
        for share in shares
    ]
    channels = [projections.channel_signs(share.seed, width) for share in shares]
    signs_VT = sent(np.concatenate(signs), rows_TH.device).double()
    channels_VH = sent(np.concatenate(channels), rows_TH.device)
    sums_VH = signs_VT @ rows_TH.to(torch.bfloat16).double()
    return (sums_VH * channels_VH).sum(dim=1).view(len(shares), projections.VALUES)


# ---------------------------------------------------------------- to a device and from it


def sent(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return values on a device; the host does not wait until they are there."""
    held = torch.from_numpy(values)
    if device.type != "cuda":
        return held.to(device)
    return held.pin_memory().to(device, non_blocking=True)


def leaving(values: torch.Tensor) -> npt.NDArray[Any]:
    """Return values as they will be on the host once `arrive` has been called."""
    if values.device.type != "cuda":
        found: npt.NDArray[Any] = values.numpy()
        return found
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    found = host.copy_(values, non_blocking=True).numpy()
    return found


def arrive(device: torch.device) -> None:
    """Wait for everything that is leaving a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ------------------------------------------------------------------------- while tokens come


def builder_on(device: torch.device | str, proof: ProofRecipe) -> IncrementalBuilder:
    """Return the builder of proofs for rows on a device."""
    kind = IncrementalBuilder if torch.device(device).type == "cpu" else DeviceBuilder
    return kind(chunk_tokens=proof.chunk_tokens, topk=proof.topk)


class DeviceBuilder(IncrementalBuilder):
    """An IncrementalBuilder whose rows are on a device; unfinished chunks stay there."""

    def _room(self, shape: tuple[int, ...], like: Any) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device=like.device)

    def _write(
        self,
        requests_R: npt.NDArray[np.int64],
        places_RN: npt.NDArray[np.int64],
        rows_RNH: Any,
    ) -> None:
        device, size = rows_RNH.device, self._chunk_tokens
        at_RN = torch.from_numpy(requests_R[:, None] * size + places_RN)
        rows = rows_RNH.reshape(-1, rows_RNH.shape[-1]).to(torch.bfloat16)
        flat = self._rows_QCH.view(-1, rows.shape[-1])
        flat.index_copy_(0, at_RN.reshape(-1).to(device, non_blocking=True), rows)

    def _taken(self, requests_R: npt.NDArray[np.int64], rows: int) -> Any:
        held = self._rows_QCH[torch.from_numpy(requests_R).to(self._rows_QCH.device), :rows]
        chunks_BE = held.flatten(1)
        return select(chunks_BE, min(self._topk, chunks_BE.shape[1]))

    def _prove(self, chunks: Any) -> list[list[bytes]]:
        return [[proof] for proof in prove_chosen(chunks.arrived())]
