"""The calibration: limits within which validators accept recomputed work as honest.

Canonical JSON whose Keccak-256 is pinned on chain (`RunRegistry.calibrationHash`).
`muster.inference.calibrate` measures and writes it; this module only holds and applies it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from muster.protocol.documents import Document, DocumentPart, Since
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.toploc.chunks import DECOYS, ChunkResult
from muster.toploc.sequential_test import HistoryLimits

Margins: TypeAlias = "npt.NDArray[np.float32] | Sequence[float]"
Share = Annotated[float, Field(ge=0, le=1)]
MeasuredKind = Literal["honest", "nothing", "cheap", "other"]


class CalibratedModel(DocumentPart):
    """What the limits were measured on."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Usual name of the base model."""
    architecture: Annotated[str, Field(min_length=1, max_length=128)]
    """Model class, as its configuration names it."""
    hidden_size: Annotated[int, Field(ge=1)]
    """Width of a hidden state."""
    vocab_size: Annotated[int, Field(ge=1)]
    """Logits per position."""
    engine: Annotated[str, Field(min_length=1, max_length=128)]
    """Engines and number formats measured; others may be outside the limits."""


class ChunkLimits(DocumentPart):
    """Largest errors of an accepted chunk. The counts are for a proof of `topk` points; for proofs
    with fewer points they are scaled down, rounded down.
    """

    max_exponent_mismatches: Annotated[int, Field(ge=0)]
    """Points whose exponent differs."""
    max_mantissa_error_mean: Annotated[float, Field(ge=0, le=127)]
    """Mean mantissa error where exponents match."""
    max_mantissa_error_median: Annotated[float, Field(ge=0, le=127)]
    """Median mantissa error where exponents match."""
    max_sign_mismatches: Annotated[int, Field(ge=0)]
    """Points whose exponent matches and whose sign differs."""
    max_decoy_matches: Annotated[int, Field(ge=0, le=DECOYS)] = DECOYS // 2
    """Decoys at which a large entry is claimed, whatever the size of the proof."""


class WideLimits(DocumentPart):
    """How many tokens of a submission may be *wide*: further from the maximum than usual. Wide
    tokens that end a completion are the most useful to a cheat and the rarest in honest work.
    """

    margin: Annotated[float, Field(ge=0)]
    """A token is wide when its margin is above this, which is below `SamplerLimits.margin`."""
    most: Annotated[int, Field(ge=0)]
    """Most wide tokens of a submission."""
    most_ends: Annotated[int, Field(ge=0)]
    """Most wide tokens of a submission where an EOS was chosen or expected."""


class SamplerLimits(DocumentPart):
    """How far a replayed choice may be from the maximum."""

    margin: Annotated[float, Field(ge=0)]
    """Largest `max - chosen` of `logit / T + noise` that counts as the same choice."""
    max_outside_per_sample: Annotated[int, Field(ge=0)]
    """Most tokens of a sample that may exceed the margin."""
    wide: Annotated[WideLimits | None, Since(4)] = None
    """Limits on the wide tokens of a submission; None for no limit."""


class Measurement(DocumentPart):
    """One row of the calibration's table: the results of one way to make rollouts."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """The way, in words."""
    kind: MeasuredKind
    """Honest work, a forger that computed nothing, a cheat that ran something much cheaper, or
    another cheat."""
    judged: Literal["chunk", "sample"]
    """What one trial is: a chunk under the proof limits, or a sample under all limits."""
    trials: Annotated[int, Field(ge=1)]
    """Trials judged."""
    accepted: Annotated[int, Field(ge=0)]
    """Trials that the limits accept."""
    failed_proofs: Annotated[int, Field(ge=0)] = 0
    """Samples that fail check 6."""
    failed_sampling: Annotated[int, Field(ge=0)] = 0
    """Samples that fail check 7."""
    exponent_mismatches: Share = 0.0
    """Share of points: the worst honest trial, the best forged one."""
    mantissa_error_mean: Annotated[float, Field(ge=0, le=127)] = 0.0
    """Worst honest, best forged."""
    mantissa_error_median: Annotated[float, Field(ge=0, le=127)] = 0.0
    """Worst honest, best forged."""
    sign_mismatches: Share = 0.0
    """Share of points: worst honest, best forged."""
    decoy_matches: Share = 0.0
    """Share of decoys: worst honest, best forged."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """A sample's largest margin: worst honest, best forged."""
    strain: Share = 0.0
    """Mean strain of the samples, see `Calibration.sample_strain`."""
    strength: Annotated[float, Field(ge=0)] | None = None
    """How far the cheat's model is from the policy: KL divergence in nats per token."""

    @model_validator(mode="after")
    def _accepted_within_trials(self) -> Self:
        if max(self.accepted, self.failed_proofs, self.failed_sampling) > self.trials:
            raise ValueError(f"{self.accepted} accepted of {self.trials}")
        return self


class MeasuredMachine(DocumentPart):
    """The measured differences of one machine from the others."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the machine in the table."""
    contributor: Annotated[str, Field(pattern=r"^(0x[0-9a-fA-F]{40})?$")]
    """Address of the contributor; empty for the machine of the calibration's owner."""
    device: Annotated[str, Field(min_length=1, max_length=64)]
    """Class of the device."""
    engine: Annotated[str, Field(min_length=1, max_length=128)]
    """Engines and number formats."""
    samples: Annotated[int, Field(ge=0)]
    """Samples, each counted once for every way that recomputed it."""
    outside: Annotated[int, Field(ge=0)]
    """Samples outside the limits that the owner's machines alone lead to."""
    exponent_mismatches: Share
    """Share of points in the worst chunk."""
    mantissa_error_mean: Annotated[float, Field(ge=0, le=127)]
    """Mean mantissa error of the worst chunk."""
    margin: Annotated[float, Field(ge=0)]
    """Largest margin of a token."""
    strain: Share
    """Mean strain of its samples under the owner's limits."""
    loss: Share
    """Largest mean share of the owner's margin that a pair of its ways gives away."""
    lean: Annotated[float, Field(ge=0)]
    """How far the worst pair of its ways leans to EOS or from it."""

    def is_outside(self, own: HistoryLimits) -> bool:
        """Return whether the owner's machines alone would lead to limits that exclude it."""
        return (
            self.outside > 0
            or self.strain > own.honest_strain
            or self.loss > own.honest_loss
            or self.lean > own.honest_lean
        )


class Calibration(Document):
    """Validation limits of one base model under one recipe."""

    NAME: ClassVar[str] = "calibration"
    MAX_BYTES: ClassVar[int] = 256 * 1024

    schema_version: Annotated[int, Field(ge=3, le=6)] = 6
    """Version of this document's form."""
    model: CalibratedModel
    """The measured model and engines."""
    proof: ProofRecipe = ProofRecipe()
    """The proofs that were measured."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """The sampling temperature that was measured."""
    submission_samples: Annotated[int | None, Field(ge=1), Since(6)] = None
    """Samples of the largest submission that the limits hold for; None if it is unknown."""
    max_new_tokens: Annotated[int | None, Field(ge=1), Since(6)] = None
    """Tokens of the longest completion that the limits hold for; None if it is unknown."""
    chunk: ChunkLimits
    """Limits of check 6."""
    sampler: SamplerLimits
    """Limits of check 7."""
    fraud_strikes: Annotated[int, Field(ge=1)]
    """Strikes from which a submission is Fraud; below, it is Rejected."""
    history: HistoryLimits = HistoryLimits(honest_strain=0.5)
    """Limits of the sequential test over a worker's submissions."""
    measured: Annotated[tuple[Measurement, ...], Field(max_length=256)] = ()
    """The measurements behind the limits."""
    machines: Annotated[tuple[MeasuredMachine, ...], Field(max_length=64), Since(5)] = ()
    """The measured machines, the owner's first."""

    def misfit(self, recipe: Recipe) -> str:
        """Return why the limits do not hold for work under a recipe; empty if they do, as far as
        the document says. Counts that honest work exceeds once in 10 million times grow with
        samples and tokens: larger work would exceed them more often.
        """
        sampling = recipe.sampling
        if (self.proof, self.temperature) != (recipe.proof, sampling.temperature):
            return "was measured with other proofs or at another temperature"
        sizes = (
            ("samples a submission", self.submission_samples, sampling.submission_samples),
            ("tokens a completion", self.max_new_tokens, sampling.max_new_tokens),
        )
        for what, most, asked in sizes:
            if most is not None and asked > most:
                return f"holds for up to {most:,} {what}, the recipe has {asked:,}"
        return ""

    def chunk_passes(self, result: ChunkResult) -> bool:
        """Return whether a chunk's errors are inside the limits."""
        return result.decoy_matches <= self.chunk.max_decoy_matches and all(
            error <= limit for error, limit in self._errors(result)
        )

    def sampler_passes(self, margins_T: Margins) -> bool:
        """Return whether a sample's margins are inside the limits; NaN is outside."""
        inside = np.asarray(margins_T) <= self.sampler.margin
        return int((~inside).sum()) <= self.sampler.max_outside_per_sample

    def wide_tokens(self, margins_T: Margins, is_end_T: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """Return how many tokens of a sample are wide, and how many of those choose or miss an EOS;
        NaN is wide. Both are 0 if the calibration does not limit them.
        """
        if self.sampler.wide is None:
            return 0, 0
        is_wide_T = ~(np.asarray(margins_T) <= self.sampler.wide.margin)
        return int(is_wide_T.sum()), int((is_wide_T & is_end_T).sum())

    def sample_strain(self, chunks: Iterable[ChunkResult], margins_T: Margins) -> float:
        """Return the largest share of a limit that any error of a sample uses: 0 without errors, 1
        at a limit or beyond.
        """
        errors = [pair for result in chunks for pair in self._errors(result)]
        worst = np.asarray(margins_T).max(initial=0)
        errors.append((float(worst), self.sampler.margin))
        return max(_strain(error, limit) for error, limit in errors)

    def loss(self, margins_T: Margins) -> float:
        """Return the mean share of the margin that tokens gave away; NaN and larger values count as
        1.
        """
        margins_T = np.asarray(margins_T)
        if not len(margins_T):
            return 0.0
        inside = np.minimum(margins_T, self.sampler.margin)
        limit = self.sampler.margin or 1.0
        return float(np.where(margins_T <= self.sampler.margin, inside / limit, 1.0).mean())

    def submission_strain(self, samples: Iterable[tuple[Iterable[ChunkResult], Margins]]) -> float:
        """Return the mean strain of a submission's samples, for the sequential test."""
        return float(np.mean([self.sample_strain(*sample) for sample in samples]))

    def _errors(self, result: ChunkResult) -> Iterator[tuple[float, float]]:
        """Yield every error of a chunk with its limit; decoys match by chance, not by error."""
        limits, points, topk = self.chunk, result.points, self.proof.topk
        yield result.exponent_mismatches, limits.max_exponent_mismatches * points // topk
        yield result.sign_mismatches, limits.max_sign_mismatches * points // topk
        yield result.mantissa_error_mean, limits.max_mantissa_error_mean
        yield result.mantissa_error_median, limits.max_mantissa_error_median


def _strain(error: float, limit: float) -> float:
    if error <= 0:
        return 0.0
    # NaN counts as 1, and a limit of zero allows no error.
    return error / limit if error < limit else 1.0
