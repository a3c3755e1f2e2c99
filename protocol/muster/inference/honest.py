"""The honest matrix: every worker's way against every validator's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from muster.inference.engine import Request
from muster.inference.measuring import Bench, Errors, Party, one_token, redrawn_margins
from muster.inference.plan import Plan
from muster.inference.ways import VALIDATORS, WORKERS
from muster.toploc import ChunkResult


@dataclass(slots=True)
class Honest:
    """What honest workers and validators were seen to differ by."""

    errors: dict[str, Errors] = field(default_factory=dict)
    """Per pair of ways."""
    margins: list[npt.NDArray[np.float32]] = field(default_factory=list)
    """Of single tokens, the noise drawn afresh."""

    def add(self, pair: str, errors: Errors) -> None:
        """Take some samples of a pair of ways."""
        self.errors[pair] = self.errors[pair] + errors if pair in self.errors else errors

    def chunks(self) -> list[ChunkResult]:
        """Return the chunks of all pairs."""
        return [result for errors in self.errors.values() for result in errors.all_chunks()]

    def token_margins(self) -> npt.NDArray[np.float32]:
        """Return the margins of all tokens, those of the work itself and those redrawn."""
        of_work = [margins for errors in self.errors.values() for margins in errors.margins]
        return np.concatenate([*of_work, *self.margins])


def measure_honest(
    bench: Bench, others: Sequence[Party], requests: list[Request], plan: Plan
) -> Honest:
    """Return errors of every worker way under every validator way, of all parties."""
    parties = [bench, *others]
    made = {
        f"{_label(party, parties)}{way.name}": party.generate(requests, way)
        for party in parties
        for way in party.ways(WORKERS[plan.profile])
    }
    made["one token only"] = bench.generate(one_token(requests))
    honest = Honest()
    for worker, work in made.items():
        for start, part in bench.parts(work):
            reference = bench.recompute(part)
            for party in parties:
                for way in party.ways(VALIDATORS[plan.profile]):
                    few = part if way.samples is None else part[: max(0, way.samples - start)]
                    if not few.completions:
                        continue
                    prefills = party.recompute(few, way)
                    pair = f"{worker}, validated {_label(party, parties)}{way.name}"
                    honest.add(pair, party.compare(few, prefills))
                    if worker == next(iter(made)):
                        # One worker's tokens are as good as any: the margins are redrawn.
                        temperature = plan.recipe.sampling.temperature
                        honest.margins.append(
                            redrawn_margins(reference, prefills, temperature, seed=plan.seed)
                        )
    return honest


def _label(party: Party, parties: Sequence[Party]) -> str:
    return "" if len(parties) == 1 else f"{party.name} "
