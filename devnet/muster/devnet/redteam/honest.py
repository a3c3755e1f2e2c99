"""A36, the price of the defences: honest work in every way to compute it, and what is rejected.

Every way of a worker (number format, batches, attention, own or lean forward pass, threads,
refilled decoding) is crossed with every way of a validator (prefill, padded prefill, decoding with
a cache, batches, attention, threads), within one number format and across both. A rollout is
generated once and judged once; its tickets are none that calibration saw.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from muster.client.calibration import prompts_of
from muster.devnet.redteam.stage import SAMPLES, VERSION, Stage
from muster.inference import Request
from muster.inference.calibrate import calibrate_model
from muster.inference.measuring import Bench, Party, VllmBench
from muster.inference.plan import ENGINES, Plan, Profile
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.inference.ways import VALIDATORS, WORKERS, Way
from muster.protocol.intervals import rate_bound
from muster.toploc import Calibration

RUNS = (
    ("transformers:float32",),
    ("transformers:bfloat16",),
    ("transformers:float32", "transformers:bfloat16"),
)
"""Engines that a run's calibration covers; one matrix each."""
WANTED = 30_000
"""Rollouts that bound the rate of false rejections by 1e-4, when none is rejected."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of a worker under one way of a validator."""

    run: str
    """The engines of the run's calibration."""
    worker: str
    """How it was generated."""
    validator: str
    """How it was judged."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One honest submission's judgement."""

    cell: Cell
    """Where it stands in the matrix."""
    number: int
    """Which submission, from 0."""
    rollouts: int
    """In it."""
    strikes: int
    """Rollouts taken for dishonest."""
    is_fraud: bool
    """Whether it would have been slashed."""
    cpu_s: float
    """Processor time."""

    def line(self) -> dict[str, Any]:
        """Return what is written."""
        return {
            "honest": True, "run": self.cell.run, "worker": self.cell.worker,
            "validator": self.cell.validator, "number": self.number, "rollouts": self.rollouts,
            "strikes": self.strikes, "is_fraud": self.is_fraud, "cpu_s": round(self.cpu_s, 3),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class HonestResult:
    """What the matrix says so far."""

    rollouts: int
    """Judged."""
    rejected: int
    """Of them, taken for dishonest."""
    slashed: int
    """Submissions that would have been slashed."""
    cells: int
    """Different cells seen."""

    @property
    def false_positive_upper(self) -> float:
        """The upper 95 % bound of the share rejected (Clopper-Pearson)."""
        return upper_bound(self.rejected, self.rollouts)


def upper_bound(count: int, trials: int) -> float:
    """Return the one-sided 95 % Clopper-Pearson bound of a rate."""
    if not count:
        return rate_bound(trials)
    from muster.protocol.intervals import at_least

    low, high = count / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        # The rate at which so few are seen with 5 % probability.
        low, high = (
            (middle, high) if 1 - at_least(trials, middle, count + 1) > 0.05 else (low, middle)
        )
    return high


def conclude_honest(judged: Sequence[Judged]) -> HonestResult:
    """Return what judged submissions say."""
    return HonestResult(
        sum(j.rollouts for j in judged),
        sum(j.strikes for j in judged),
        sum(j.is_fraud for j in judged),
        len({j.cell for j in judged}),
    )


class HonestMatrix:
    """The cells of one run: its engines, its calibration."""

    def __init__(self, stage: Stage, engines: Sequence[str], *, profile: Profile = "full") -> None:
        self._stage = stage
        self.name = " + ".join(engines)
        self._parties = [_party(stage, engine) for engine in engines]
        self.calibration = _calibrated(stage, engines, profile)
        self._pairs = [
            ((maker, own), (judge, other))
            for maker, judge in product(self._parties, self._parties)
            for own, other in product(maker.ways(WORKERS["full"]), judge.ways(VALIDATORS["full"]))
        ]

    @property
    def cells(self) -> int:
        """How many cells there are."""
        return len(self._pairs)

    def judge(self, number: int) -> Judged:
        """Generate and judge the submission of a number; cells are taken in turn."""
        (maker, own), (judge, other) = self._pairs[number % len(self._pairs)]
        started = time.process_time()
        work = maker.generate(self._requests(number), _whole(own))
        errors = judge.compare(work, judge.recompute(work, _whole(other)))
        strikes = sum(
            not (all(map(self.calibration.chunk_passes, chunks))
                 and self.calibration.sampler_passes(margins))
            for chunks, margins in zip(errors.chunks, errors.margins, strict=True)
        )  # fmt: skip
        return Judged(
            Cell(self.name, f"{maker.name} {own.name}", f"{judge.name} {other.name}"),
            number,
            len(work.completions),
            strikes,
            strikes >= self.calibration.fraud_strikes,
            time.process_time() - started,
        )

    def _requests(self, number: int) -> list[Request]:
        stage, sampling = self._stage, self._stage.recipe.sampling
        assignment = stage.assignment(stage.ticket(Random(f"honest/{self.name}/{number}")))
        return [
            Request(group.prompt_tokens, seed, sampling.temperature, sampling.max_new_tokens)
            for group in assignment.groups
            for seed in group.seeds
        ]


def _whole(way: Way) -> Way:
    """Return the way for all samples of a submission, also where calibration takes a few."""
    from dataclasses import replace

    return replace(way, samples=None)


def _party(stage: Stage, engine: str) -> Party:
    if engine.startswith("vllm:"):
        vllm = VllmEngine(ENGINES[engine])
        vllm.load_policy(stage.model, VERSION)
        return VllmBench(vllm, stage.recipe)
    transformers = TransformersEngine(ENGINES[engine])
    transformers.load_policy(stage.model, VERSION)
    return Bench(transformers, stage.recipe)


def _calibrated(stage: Stage, engines: Sequence[str], profile: Profile) -> Calibration:
    kept = stage.folder / f"calibration-{'-'.join(engines).replace(':', '-')}-{profile}"
    if kept.exists():
        return Calibration.from_bytes(kept.read_bytes())
    plan = Plan(
        stage.recipe, prompts_of(stage.task_set, stage.recipe), engines, profile=profile,
        samples=SAMPLES,
    )  # fmt: skip
    run = calibrate_model(stage.model, plan)
    if run.refusal is not None:
        raise run.refusal
    # Only the limits: two engines have more pairs of ways than a document has room for.
    limits = run.calibration.model_copy(update={"measured": ()})
    kept.write_bytes(limits.to_bytes())
    return limits


def play_honest(
    stage: Stage,
    rollouts: int,
    *,
    runs: Sequence[Sequence[str]] = RUNS,
    profile: Profile = "full",
    done: Sequence[Judged] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Judged]:
    """Yield honest submissions until `rollouts` are judged, those done before included.

    Runs take turns in thirds; what was judged before is not judged again.
    """
    share = -(-rollouts // len(runs))
    known = {(j.cell.run, j.number): j for j in done}
    seen = sum(j.rollouts for j in done)
    for engines in runs:
        matrix: HonestMatrix | None = None
        name, judged, number = " + ".join(engines), 0, 0
        while judged < share:
            earlier = known.get((name, number))
            if earlier is None:
                matrix = matrix or HonestMatrix(stage, engines, profile=profile)
                earlier = matrix.judge(number)
                seen += earlier.rollouts
                if progress:
                    progress(seen, max(seen, rollouts))
                yield earlier
            judged += earlier.rollouts
            number += 1


def read_judged(record: Path) -> list[Judged]:
    """Return the honest submissions in a record of trials."""
    if not record.exists():
        return []
    rows = (json.loads(line) for line in record.read_text().splitlines())
    return [
        Judged(
            Cell(r["run"], r["worker"], r["validator"]), r["number"], r["rollouts"], r["strikes"],
            r["is_fraud"], r["cpu_s"],
        )
        for r in rows if r.get("honest")
    ]  # fmt: skip
