"""The engine's measurements of a submission's rows for checks 6 and 7: proofs against hidden
states, tokens against noise.

Axes: T completion tokens; N those that the model sampled, at `sampled_places`: replies of an
environment were not sampled; S shares of a row in fingerprinted blocks.
"""

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.inference import Examined, InferenceEngine, Sample
from muster.inference.engine import Share
from muster.protocol.errors import EngineError, SampleUnfit
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.protocol.rollouts import Rollout, sampled_places
from muster.toploc import Calibration, ChunkResult, split_proofs
from muster.toploc.sequential_test import MOST_FLIPS, Flip


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Results of the policy's forward pass over one sample."""

    chunks: tuple[ChunkResult, ...]
    """Comparison of each proof with the hidden states."""
    margins: npt.NDArray[np.float32]
    """[N]: how far each sampled token is below the replayed maximum, in logits / temperature."""
    ends: npt.NDArray[np.bool_]
    """[N]: whether an EOS was chosen or expected there."""
    tokens: tuple[tuple[int, ...], tuple[int, ...]]
    """Prompt and completion; samples equal in both have the same hidden states."""
    flips: tuple[Flip, ...] = ()
    """Tokens that differ from this machine's sampling with the same noise: at most `MOST_FLIPS`,
    those with the smallest keys."""
    flip_keys: tuple[int, ...] = ()
    """Key of each flip, ascending, see `keys_of`."""
    projections: tuple[tuple[float, ...], ...] = ()
    """[S, VALUES]: what the row adds to each share's block, see `muster.toploc.projections`."""


def replay_rows(
    rows: Sequence[Rollout],
    engine: InferenceEngine,
    recipe: Recipe,
    shares: Sequence[tuple[Share, ...]] = (),
    *,
    seed: bytes = b"",
) -> list[Replay]:
    """Return the replay of every row under the loaded policy; proofs must be canonical.

    `shares` are each row's shares of fingerprinted blocks; if empty, nothing is fingerprinted.
    `seed` is the batch's, which chooses the flips that count. If memory is short, the rows are
    examined in halves.
    """
    samples = [
        Sample(
            row.prompt_tokens,
            row.completion_tokens,
            row.sampling_seed,
            split_row_proofs(row, recipe.proof, engine.hidden_size),
            of_row,
        )
        for row, of_row in zip(rows, shares or [()] * len(rows), strict=True)
    ]
    found = _examine(samples, engine, recipe)
    return [
        _replay(row, each, engine.eos_token_ids, seed + b"flips" + number.to_bytes(4, "big"))
        for number, (row, each) in enumerate(zip(rows, found, strict=True))
    ]


def _examine(samples: Sequence[Sample], engine: InferenceEngine, recipe: Recipe) -> list[Examined]:
    temperature = recipe.sampling.temperature
    try:
        return engine.examine(samples, proof=recipe.proof, temperature=temperature)
    except SampleUnfit:
        raise
    except (EngineError, MemoryError):
        if len(samples) == 1:
            raise
    gc.collect()
    half = len(samples) // 2
    return [
        each for part in (samples[:half], samples[half:]) for each in _examine(part, engine, recipe)
    ]


def _replay(row: Rollout, found: Examined, eos: frozenset[int], source: bytes) -> Replay:
    sampled = sampled_places(len(row.completion_tokens), row.replies)
    ends_T = np.isin(row.completion_tokens, list(eos)) | np.isin(
        found.replayed.expected_T, list(eos)
    )
    flips, keys = _flips(row, found, sampled, eos, source)
    return Replay(
        found.chunks,
        found.replayed.margins_T[sampled],
        ends_T[sampled],
        (row.prompt_tokens, row.completion_tokens),
        flips,
        keys,
        tuple(map(tuple, found.projections.tolist())),
    )


def split_row_proofs(row: Rollout, proof: ProofRecipe, hidden_size: int) -> list[bytes]:
    """Return a row's proofs one by one; raises ProofError for an encoding that is not canonical."""
    return split_proofs(
        row.proofs,
        tokens=len(row.completion_tokens),
        hidden_size=hidden_size,
        chunk_tokens=proof.chunk_tokens,
        topk=proof.topk,
    )


def keys_of(source: bytes, tokens: int) -> npt.NDArray[np.uint64]:
    """Return the key of every token of a row. `source` begins with the batch's seed: a worker does
    not know which flips will count before it commits.
    """
    stream = hashlib.shake_256(source).digest(8 * tokens)
    return np.frombuffer(stream, ">u8").astype(np.uint64)


def _flips(
    row: Rollout, found: Examined, sampled: Sequence[int], eos: frozenset[int], source: bytes
) -> tuple[tuple[Flip, ...], tuple[int, ...]]:
    """Return tokens that differ from the replay's, and their keys: those of the smallest keys."""
    tokens_T, expected_T = np.asarray(row.completion_tokens, np.int64), found.replayed.expected_T
    places = np.array(sampled)
    flipped = places[tokens_T[places] != expected_T[places]]
    if not len(flipped):
        return (), ()
    keys = keys_of(source, len(tokens_T))[flipped]
    counted = np.argsort(keys, kind="stable")[:MOST_FLIPS]
    flipped = flipped[counted]
    columns = (tokens_T[flipped], expected_T[flipped], found.replayed.is_likelier_T[flipped])
    flips = []
    for chosen, expected, is_likelier in zip(*(c.tolist() for c in columns), strict=True):
        to_end = (chosen in eos) - (expected in eos)
        flips.append(Flip(chosen, expected, to_end, 1 if is_likelier else -1))
    return tuple(flips), tuple(keys[counted].tolist())


# Statistics of checks 6 and 7 with their limits, to explain a verdict to people.
#
# Knows the calibration and the replays, but no files, chains or verdicts.


@dataclass(frozen=True, slots=True)
class Statistic:
    """The worst value of one statistic over a submission."""

    name: str
    """What is compared."""
    worst: float
    """The largest value found."""
    limit: float
    """The limit that applied to it."""

    @property
    def passes(self) -> bool:
        """Whether it is within its limit; NaN is not."""
        return self.worst <= self.limit

    def __str__(self) -> str:
        mark = "<=" if self.passes else ">"
        return f"{self.name} {self.worst:.4g} {mark} {self.limit:.4g}"


def measure(replays: Sequence[Replay], calibration: Calibration) -> list[Statistic]:
    """Return each statistic of checks 6 and 7 where it came closest to its limit, or beyond."""
    chunks = [chunk for replay in replays for chunk in replay.chunks]
    found = [_worst(name, chunks, calibration) for name in _CHUNK_STATISTICS] if chunks else []
    if replays:
        sampler = calibration.sampler
        largest = max(float(np.max(replay.margins, initial=0.0)) for replay in replays)
        outside = max(int((~(replay.margins <= sampler.margin)).sum()) for replay in replays)
        found.append(
            Statistic("tokens outside the margin", outside, sampler.max_outside_per_sample)
        )
        # The margin alone is not a limit: some tokens of a sample may exceed it.
        allowance = sampler.margin if sampler.max_outside_per_sample == 0 else float("inf")
        found.append(Statistic("largest margin", largest, allowance))
        if sampler.wide is not None:
            counts = [calibration.wide_tokens(replay.margins, replay.ends) for replay in replays]
            wide, ends = (sum(column) for column in zip(*counts, strict=True))
            found.append(Statistic("wide tokens", wide, sampler.wide.most))
            found.append(Statistic("wide tokens at an end", ends, sampler.wide.most_ends))
    return found


def _worst(name: str, chunks: Sequence[ChunkResult], calibration: Calibration) -> Statistic:
    limits, topk = calibration.chunk, calibration.proof.topk
    fixed = {
        "mantissa_error_mean": limits.max_mantissa_error_mean,
        "mantissa_error_median": limits.max_mantissa_error_median,
        "decoy_matches": float(limits.max_decoy_matches),
    }
    # A chunk with fewer points has a proportional limit.
    shared = {
        "exponent_mismatches": limits.max_exponent_mismatches,
        "sign_mismatches": limits.max_sign_mismatches,
    }
    candidates = [
        Statistic(
            name.replace("_", " "),
            float(getattr(chunk, name)),
            fixed[name] if name in fixed else float(shared[name] * chunk.points // topk),
        )
        for chunk in chunks
    ]
    return max(candidates, key=lambda each: (not each.passes, each.worst - each.limit))


_CHUNK_STATISTICS = (
    "exponent_mismatches",
    "mantissa_error_mean",
    "mantissa_error_median",
    "sign_mismatches",
    "decoy_matches",
)
