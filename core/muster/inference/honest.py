"""The honest matrix: every worker's way against every validator's.

Nearly all margins are zero, so many draws are needed to see how large the others may be. Therefore
the rows of one worker get fresh noise: the reference chooses tokens under it, and every validator
replays those choices too. Axes: T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from muster.inference.calibrated_limits import Drawn
from muster.inference.calibration_plan import MIN_CHUNKS, PLAIN, MeasuringPlan
from muster.inference.engine import Completion, Examined, Redraw, Request
from muster.inference.measuring import Delivery, Errors, OwnParty, Party, Survey, one_token
from muster.protocol.encoding import abi_words, keccak
from muster.toploc import ChunkResult

_MOST_REDRAWS = 16
_REDRAWN_VALUES = 1 << 22
"""Noise values drawn per way; one draw at least."""


@dataclass(slots=True)
class Honest:
    """Measured differences between honest workers and validators."""

    survey: Survey
    """Findings of one forward pass over the plain way's work."""
    errors: dict[str, Errors] = field(default_factory=dict)
    """Errors per pair of ways."""
    redrawn: dict[str, Drawn] = field(default_factory=dict)
    """Choices under fresh noise, per pair of ways."""
    shortest: Delivery = field(default_factory=lambda: Delivery([], []))
    """Honest work of one token each."""
    shifts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Per pair, the difference of the probability of EOS: sums over tokens, signed and absolute."""

    claimed: set[str] = field(default_factory=set)
    """Pairs that were not measured here: contributors report them of their own validators."""

    def add(self, pair: str, errors: Errors) -> None:
        """Add some samples of a pair of ways."""
        self.errors[pair] = self.errors[pair] + errors if pair in self.errors else errors

    def chunks(self) -> list[ChunkResult]:
        """Return the chunks of all pairs."""
        return [result for errors in self.errors.values() for result in errors.all_chunks()]

    def token_margins(self) -> npt.NDArray[np.float32]:
        """Return the margins of all tokens: of the work itself, and of the redrawn choices."""
        seen = [
            *((pair, margins) for pair, each in self.errors.items() for margins in each.margins),
            *((pair, drawn.margins_N) for pair, drawn in self.redrawn.items()),
        ]
        # A contributor's number of tokens cannot be checked: only its worst margin counts.
        return np.concatenate(
            [
                margins_N.max(keepdims=True) if pair in self.claimed else margins_N
                for pair, margins_N in seen
            ]
        )

    def drawn_apart(self) -> tuple[list[Drawn], list[Drawn]]:
        """Return the redrawn tokens of pairs that were measured here, and of those claimed."""
        own = [drawn for pair, drawn in self.redrawn.items() if pair not in self.claimed]
        return own, [drawn for pair, drawn in self.redrawn.items() if pair in self.claimed]

    def margins_by_pair(self) -> list[npt.NDArray[np.float32]]:
        """Return the redrawn margins of every pair."""
        return [drawn.margins_N for drawn in self.redrawn.values()]

    def leans(self) -> list[float]:
        """Return per pair the bias of its choices to or from EOS: 0 for none, 1 for always."""
        sums = self.shifts.values()
        return [abs(signed) / absolute for signed, absolute in sums if absolute > 0]


def measure_honest(
    bench: OwnParty,
    others: Sequence[Party],
    requests: list[Request],
    plan: MeasuringPlan,
    tell: Callable[[str], None] = lambda _: None,
) -> Honest:
    """Return errors of every worker way under every validator way, of all parties.

    `requests` are more than the plan's base: if samples end early, more of them are generated.
    """
    parties = [bench, *others]
    tell("honest work")
    reference = _Reference(bench, _enough(bench, requests, plan), plan)
    honest = Honest(reference.survey)
    for party in parties:
        for way in party.ways(plan.workers()):
            worker = f"{_label(party, parties)}{way.name}"
            if party is bench and way == PLAIN:
                judge(honest, parties, worker, reference.survey.work, plan, reference)
                continue
            tell(f"honest work, {worker}")
            work = party.generate(reference.survey.work.requests, way)
            judge(honest, parties, worker, work, plan)
    honest.shortest = bench.generate(one_token(reference.survey.work.requests))
    judge(honest, parties, "one token only", honest.shortest, plan)
    return honest


def _enough(bench: OwnParty, requests: list[Request], plan: MeasuringPlan) -> Delivery:
    """Return the plain way's work: the plan's samples, then more until there are enough chunks.

    Forgers are not tried on a length that few chunks have, so there is one of each to spare.
    """
    wanted = MIN_CHUNKS + plan.recipe.proof.chunk_tokens
    asked = requests[: plan.base]
    completions = list(bench.generate(asked).completions)
    while (missing := wanted - _chunks(completions)) > 0 and len(asked) < len(requests):
        # As many samples as hold the missing chunks, if they end as early as the others.
        count = -(-missing * len(completions) // max(1, _chunks(completions)))
        more = requests[len(asked) : len(asked) + count]
        completions += bench.generate(more).completions
        asked = [*asked, *more]
    return Delivery(asked, completions)


def _chunks(completions: Sequence[Completion]) -> int:
    return sum(len(completion.proofs) for completion in completions)


def judge(
    honest: Honest,
    parties: Sequence[Party],
    worker: str,
    work: Delivery,
    plan: MeasuringPlan,
    reference: _Reference | None = None,
) -> None:
    """Add what every validator finds in some work. With a `reference`, its choices under fresh
    noise are added too; the work of one worker is enough for those.
    """
    for party in parties:
        for way in party.ways(plan.validators()):
            few = work[: way.samples]
            pair = f"{worker}, validated {_label(party, parties)}{way.name}"
            if reference is None:
                honest.add(pair, Errors.of(party.examine(few, way)))
            elif party is parties[0] and way == PLAIN:
                # The reference is this validator: its choices are those it expects.
                honest.add(pair, Errors.of(reference.survey.found))
                honest.redrawn[pair] = reference.unmoved()
                honest.shifts[pair] = 0.0, 0.0
            else:
                redraws = reference.survey.redraws[: len(few.requests)]
                found = party.examine(few, way, redraws)
                honest.add(pair, Errors.of(found))
                honest.redrawn[pair] = reference.drawn(found)
                honest.shifts[pair] = reference.shift(found)


class _Reference:
    """The reference's choices at the rows of some work, and its probabilities of EOS."""

    def __init__(self, bench: OwnParty, work: Delivery, plan: MeasuringPlan) -> None:
        tokens = sum(len(completion.tokens) for completion in work.completions)
        draws = _REDRAWN_VALUES // (tokens * bench.engine.vocab_size)
        draws = min(_MOST_REDRAWS, max(1, draws))
        asked = [
            tuple(Redraw(_seed(plan.seed, place, n), completion.tokens) for n in range(draws))
            for place, completion in enumerate(work.completions)
        ]
        self._eos = sorted(bench.engine.eos_token_ids)
        self.survey = bench.survey(work, asked, [request.seed ^ 1 for request in work.requests])

    def unmoved(self) -> Drawn:
        """Return the reference's choices as it replays them itself."""
        tokens = [redraw.tokens for redraws in self.survey.redraws for redraw in redraws]
        is_end_N = np.isin(np.concatenate(tokens), self._eos)
        return Drawn(np.zeros(len(is_end_N), np.float32), is_end_N)

    def drawn(self, validator: Sequence[Examined]) -> Drawn:
        """Return the reference's choices as another validator replays them."""
        pairs = [
            (redraw.tokens, drawn)
            for redraws, each in zip(self.survey.redraws, validator, strict=False)
            for redraw, drawn in zip(redraws, each.redrawn, strict=True)
        ]
        return Drawn(
            np.concatenate([drawn.margins_T for _, drawn in pairs]),
            np.concatenate(
                [
                    np.isin(tokens, self._eos) | np.isin(drawn.expected_T, self._eos)
                    for tokens, drawn in pairs
                ]
            ),
        )

    def shift(self, validator: Sequence[Examined]) -> tuple[float, float]:
        """Return `end_shift` between the reference and another validator."""
        return end_shift(_ends(self.survey.found[: len(validator)]), _ends(validator))


def _seed(seed: int, place: int, draw: int) -> int:
    return int.from_bytes(keccak(abi_words(seed, place, draw, 3))[:8], "big")


def _ends(found: Sequence[Examined]) -> npt.NDArray[np.float64]:
    return np.concatenate([each.ends_T for each in found if each.ends_T is not None])


def _label(party: Party, parties: Sequence[Party]) -> str:
    return "" if len(parties) == 1 else f"{party.name} "


def end_shift(
    own_N: npt.NDArray[np.float64], other_N: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Return the sums over tokens of the difference of the probability of EOS, signed and absolute:
    how many more tokens become EOS in one than in the other, and how many flip at all.

    Less than one flip in a million tokens counts as none: it is float32 rounding that no history of
    choices shows. If nearly all rows are equal, the few that differ would look like a full bias.
    """
    shift = np.where(np.abs(own_N - other_N) > 1e-6, own_N - other_N, 0.0)
    return float(shift.sum()), float(np.abs(shift).sum())
