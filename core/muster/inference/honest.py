"""The honest matrix: every worker's way against every validator's.

Margins are nearly all zero, and it takes many draws to see how large the rest may be. So one
worker's tokens are drawn again under fresh noise, as the reference would choose them, and every
validator replays those choices too. Axes: T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from muster.inference.engine import Examined, Redraw, Request
from muster.inference.limits import Drawn
from muster.inference.measuring import Delivery, Errors, OwnParty, Party, Survey, one_token
from muster.inference.plan import MIN_CHUNKS, PLAIN, MeasuringPlan
from muster.protocol.encoding import abi_words, keccak
from muster.toploc import ChunkResult

_MOST_REDRAWS = 16
_REDRAWN_VALUES = 1 << 22
"""Noise values drawn per way, but for one draw at least."""


@dataclass(slots=True)
class Honest:
    """What honest workers and validators were seen to differ by."""

    survey: Survey
    """What one forward pass over the plain way's work showed."""
    errors: dict[str, Errors] = field(default_factory=dict)
    """Per pair of ways."""
    redrawn: dict[str, Drawn] = field(default_factory=dict)
    """Single tokens per pair of ways, the noise drawn afresh."""
    shortest: Delivery = field(default_factory=lambda: Delivery([], []))
    """Honest work of one token each."""
    shifts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Per pair, how the probability of EOS differs: sums over tokens, signed and absolute."""

    claimed: set[str] = field(default_factory=set)
    """Pairs that nobody here has seen: what contributors say of their own validators."""

    def add(self, pair: str, errors: Errors) -> None:
        """Take some samples of a pair of ways."""
        self.errors[pair] = self.errors[pair] + errors if pair in self.errors else errors

    def chunks(self) -> list[ChunkResult]:
        """Return the chunks of all pairs."""
        return [result for errors in self.errors.values() for result in errors.all_chunks()]

    def token_margins(self) -> npt.NDArray[np.float32]:
        """Return the margins of all tokens, those of the work itself and those redrawn."""
        seen = [
            *((pair, margins) for pair, each in self.errors.items() for margins in each.margins),
            *((pair, drawn.margins_N) for pair, drawn in self.redrawn.items()),
        ]
        # Nobody here has seen how many tokens a contributor has: the worst of each lot counts.
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
        """Return how far every pair's choices lean to EOS or from it: 0 evenly, 1 always."""
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

    `requests` are more than the plan's base: where samples end early, some more are generated.
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
    """Return the plain way's work: of the plan's size, of more where it has too few chunks.

    Forgers are not tried on a length that few chunks have, so there is one of each to spare.
    """
    work = bench.generate(requests[: plan.base])
    wanted = MIN_CHUNKS + plan.recipe.proof.chunk_tokens
    missing = wanted - sum(len(completion.proofs) for completion in work.completions)
    if missing <= 0:
        return work
    asked = requests[plan.base : plan.base + missing]
    more = bench.generate(asked)
    return Delivery([*work.requests, *asked], [*work.completions, *more.completions])


def judge(
    honest: Honest,
    parties: Sequence[Party],
    worker: str,
    work: Delivery,
    plan: MeasuringPlan,
    reference: _Reference | None = None,
) -> None:
    """Take what every validator finds in some work; of one worker's, margins are redrawn too: its
    tokens are as good as any.
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
    """What the reference chooses at the rows of some work, and how likely an EOS is to it."""

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
        """Return its own choices as it finds them itself."""
        tokens = [redraw.tokens for redraws in self.survey.redraws for redraw in redraws]
        is_end_N = np.isin(np.concatenate(tokens), self._eos)
        return Drawn(np.zeros(len(is_end_N), np.float32), is_end_N)

    def drawn(self, validator: Sequence[Examined]) -> Drawn:
        """Return the reference's choices as another finds them."""
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
        """Return `end_shift` from the reference to another's findings."""
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
    how many more tokens become EOS here than there, and how many flip at all.

    Less than a flip in a million tokens is rounding of float32 that no history of choices shows.
    Where nearly all rows are computed alike, the few that differ would seem to lean always.
    """
    shift = np.where(np.abs(own_N - other_N) > 1e-6, own_N - other_N, 0.0)
    return float(shift.sum()), float(np.abs(shift).sum())
