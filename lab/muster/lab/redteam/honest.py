"""A36, the price of the defences: honest work in every way of computing, and its rejections.

Every way of a worker (engine, number format, batches, padding, attention, own or lean forward pass,
threads, refilled decoding) is crossed with every way of a validator (engine, number format,
prefill, padded prefill, decoding with a cache, batches, attention, threads): `cells` says which
are combined. Every submission is newly generated, on a ticket that calibration never saw, and
judged by up to three validators that compute differently. Generated rollouts are counted: one is
rejected if any of its judges takes it for dishonest. Judgements are also counted, but give no
bound, because those of one submission concern the same rollouts.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from muster.client.calibration import prompts_of
from muster.client.tickets import derive
from muster.inference import Request
from muster.inference.calibrate import calibrate_model
from muster.inference.calibration_plan import ENGINES, MeasuringPlan, Profile, Way
from muster.inference.engine import Room
from muster.inference.measuring import Errors, OwnParty, Party
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.inference.vllm.launcher import find_python
from muster.lab.redteam.cells import (
    ONE_LENGTH,
    RUNS,
    SEVERAL_LENGTHS,
    VLLM_RUNS,
    Cell,
    EngineWay,
    Panel,
    panels,
    validator_values,
    worker_values,
)
from muster.lab.redteam.stage import SAMPLES, VERSION, Stage
from muster.protocol.errors import EngineError
from muster.protocol.intervals import at_least, rate_bound
from muster.tasks import TaskSet
from muster.tasks.toys import make_sort
from muster.toploc import Calibration

WANTED = 30_000
"""Number of rollouts that, if none is rejected, bounds the rate of false rejections by 1e-4."""
DIGITS = (2, 3, 4, 5)
"""Digits of the problems for prompts of several lengths."""
_PROBLEMS = 64
"""Number of problems of each length."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One honest submission and its judgements."""

    run: str
    """The engines of the run's calibration."""
    worker: str
    """How it was generated."""
    strikes: Mapping[str, int]
    """Rollouts taken for dishonest, by validator."""
    number: int
    """Number of the submission in its panel, from 0."""
    prompts: str
    """Whether its prompts have one length or several."""
    rollouts: int
    """Rollouts in the submission."""
    rejected: int
    """Rollouts that any of its validators took for dishonest."""
    is_fraud: bool
    """Whether any validator would have had it slashed."""
    cpu_s: float
    """Processor time of this process: vLLM's is not in it."""

    @property
    def key(self) -> tuple[str, str, tuple[str, ...], int]:
        """Unique key of the submission."""
        return self.run, self.worker, tuple(self.strikes), self.number

    @property
    def cells(self) -> list[Cell]:
        """Its cells in the matrix."""
        return [Cell(self.run, self.worker, validator) for validator in self.strikes]

    def line(self) -> dict[str, Any]:
        """Return the line of the record."""
        return {
            "honest": True, "run": self.run, "worker": self.worker, "strikes": dict(self.strikes),
            "number": self.number, "prompts": self.prompts, "rollouts": self.rollouts,
            "rejected": self.rejected, "is_fraud": self.is_fraud, "cpu_s": round(self.cpu_s, 3),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Margin:
    """The counts for one value of one dimension of the matrix."""

    dimension: str
    """The dimension's name."""
    value: str
    """The value in it."""
    rollouts: int
    """Rollouts that workers generated in this way."""
    judgements: int
    """Judgements of rollouts that validators made in this way."""


@dataclass(frozen=True, slots=True)
class HonestResult:
    """Results of the matrix so far."""

    rollouts: int
    """Generated rollouts, each judged at least once."""
    rejected: int
    """Rollouts taken for dishonest by any judge."""
    slashed: int
    """Submissions that would have been slashed."""
    cells: int
    """Different cells seen."""
    judgements: int = 0
    """Judgements of rollouts by all validators."""
    margins: tuple[Margin, ...] = ()
    """Counts by dimension and value."""

    @property
    def false_positive_upper(self) -> float:
        """The upper 95 % bound of the share rejected (Clopper-Pearson)."""
        return upper_bound(self.rejected, self.rollouts)


def upper_bound(number: int, trials: int) -> float:
    """Return the one-sided 95 % Clopper-Pearson bound of a rate."""
    if not number:
        return rate_bound(trials)
    low, high = number / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        # The rate at which so few or fewer are observed with 5 % probability.
        low, high = (
            (middle, high) if 1 - at_least(trials, middle, number + 1) > 0.05 else (low, middle)
        )
    return high


def conclude_honest(judged: Sequence[Judged]) -> HonestResult:
    """Return the result of judged submissions."""
    return HonestResult(
        sum(j.rollouts for j in judged),
        sum(j.rejected for j in judged),
        sum(j.is_fraud for j in judged),
        len({cell for j in judged for cell in j.cells}),
        sum(j.rollouts * len(j.strikes) for j in judged),
        honest_margins(judged),
    )


def honest_margins(judged: Sequence[Judged]) -> tuple[Margin, ...]:
    """Return the rollouts generated and judged for every value of every dimension.

    In each dimension these add up to all rollouts and to all judgements.
    """
    made: Counter[tuple[str, str]] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    for j in judged:
        worker = worker_values(j.worker)
        made.update(dict.fromkeys((worker | {"prompts": j.prompts}).items(), j.rollouts))
        for name in j.strikes:
            validator = validator_values(name) | {"prompts": j.prompts}
            pair = f"{worker['number format']} judged in {validator['number format']}"
            seen.update(dict.fromkeys(validator.items(), j.rollouts))
            seen["formats crossed", pair] += j.rollouts
            pair = f"{worker['engine']} judged by {validator['engine']}"
            seen["engines crossed", pair] += j.rollouts
    places = sorted(
        made.keys() | seen.keys(), key=lambda place: (place[0], len(place[1]), place[1])
    )
    return tuple(Margin(*place, made[place], seen[place]) for place in places)


def installed_runs() -> tuple[tuple[str, ...], ...]:
    """Return the runs that can be played here; those with vLLM only if `make vllm` installed it."""
    try:
        find_python()
    except EngineError:
        return RUNS
    return RUNS + VLLM_RUNS


class HonestMatrix:
    """Plays panels; makes each engine and calibration when it is first needed."""

    def __init__(self, stage: Stage, *, profile: Profile = "full") -> None:
        self._stage = stage
        self._profile: Profile = profile
        self._parties: dict[tuple[str, Way | None], Party] = {}
        self._calibrations: dict[tuple[str, ...], Calibration] = {}

    def close(self) -> None:
        """End vLLM's processes."""
        for party in self._parties.values():
            if isinstance(party.engine, VllmEngine):
                party.engine.close()

    def judge(self, panel: Panel, number: int) -> Judged:
        """Generate and judge a panel's submission with this number."""
        limits = self._calibration(panel.engines)
        started = time.process_time()
        prompts = panel.prompts(number)
        requests = self._requests(f"honest/{panel.key}/{number}", prompts)
        work = self._party(panel.worker).generate(requests, _whole(panel.worker.way))
        struck = {}
        for validator in panel.validators:
            party = self._party(validator)
            errors = Errors.of(party.examine(work, _whole(validator.way)))
            struck[validator.name] = _struck(limits, errors)
        strikes = {name: int(is_struck.sum()) for name, is_struck in struck.items()}
        return Judged(
            panel.run, panel.worker.name, strikes, number, prompts, len(work.completions),
            int(np.any(list(struck.values()), axis=0).sum()),
            max(strikes.values()) >= limits.fraud_strikes,
            time.process_time() - started,
        )  # fmt: skip

    @cached_property
    def _task_sets(self) -> dict[str, TaskSet]:
        sets = [make_sort(_PROBLEMS, seed=2, digits=digits) for digits in DIGITS]
        problems = [problem for together in zip(*sets, strict=True) for problem in together]
        ragged = TaskSet.of("sort-digits-ragged", "seed-2", problems)
        return {ONE_LENGTH: self._stage.task_set, SEVERAL_LENGTHS: ragged}

    def _requests(self, name: str, prompts: str) -> list[Request]:
        stage, recipe = self._stage, self._stage.recipe
        sampling = recipe.sampling
        ticket = stage.ticket(Random(name))
        groups = derive(ticket, recipe, self._task_sets[prompts], stage.engine).groups
        return [
            Request(group.prompt_tokens, seed, sampling.temperature, sampling.max_new_tokens)
            for group in groups
            for seed in group.seeds
        ]

    def _party(self, asked: EngineWay) -> Party:
        """Return the engine: one per format on transformers, on vLLM a process for each way."""
        key = asked.engine, asked.way if asked.is_vllm else None
        if key not in self._parties:
            self._parties[key] = self._load(asked)
        return self._parties[key]

    def _load(self, asked: EngineWay) -> Party:
        dtype, way = ENGINES[asked.engine], asked.way
        if asked.is_vllm:
            vllm = VllmEngine(dtype, threads=way.threads or 1, room=Room(max_rows=way.max_rows))
            vllm.load_policy(self._stage.model, VERSION)
            return Party(f"vLLM {vllm.dtype}", vllm, self._stage.recipe)
        transformers = TransformersEngine(dtype)
        transformers.load_policy(self._stage.model, VERSION)
        return OwnParty(transformers, self._stage.recipe)

    def _calibration(self, engines: tuple[str, ...]) -> Calibration:
        if engines not in self._calibrations:
            self._calibrations[engines] = self._kept(engines)
        return self._calibrations[engines]

    def _kept(self, engines: tuple[str, ...]) -> Calibration:
        name = "-".join(engines).replace(":", "-")
        kept = self._stage.folder / f"honest-limits-{name}-{self._profile}"
        if kept.exists():
            return Calibration.from_bytes(kept.read_bytes())
        made = self._calibrate(engines)
        kept.write_bytes(made.to_bytes())
        return made

    def _calibrate(self, engines: tuple[str, ...]) -> Calibration:
        recipe = self._stage.recipe
        sets = [prompts_of(task_set, recipe) for task_set in self._task_sets.values()]
        prompts = [prompt for together in zip(*sets, strict=True) for prompt in together]
        plan = MeasuringPlan(recipe, prompts, engines, profile=self._profile, samples=SAMPLES)
        run = calibrate_model(self._stage.model, plan)
        if run.refusal is not None:
            raise run.refusal
        # Only the limits: several engines have more pairs of ways than a document has room for.
        return run.calibration.model_copy(update={"measured": ()})


def _struck(limits: Calibration, errors: Errors) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rollouts a validator takes for dishonest."""
    pairs = zip(errors.chunks, errors.margins, strict=True)
    return np.array(
        [not (all(map(limits.chunk_passes, c)) and limits.sampler_passes(m)) for c, m in pairs]
    )


def _whole(way: Way) -> Way:
    """Return the way for all samples of a submission, even if calibration takes only a few."""
    return replace(way, samples=None)


def play_honest(
    stage: Stage,
    rollouts: int,
    *,
    runs: Sequence[tuple[str, ...]] | None = None,
    profile: Profile = "full",
    done: Sequence[Judged] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Judged]:
    """Yield honest submissions until this many rollouts are judged, including those in `done`.

    Every cell is visited once before any is visited twice. Submissions in `done` are not judged
    again. `runs` are by default the installed ones; `progress` is called with the judged and wanted
    rollouts.
    """
    ordered = panels(installed_runs() if runs is None else runs)
    known = {j.key for j in done}
    seen = sum(j.rollouts for j in done)
    with closing(HonestMatrix(stage, profile=profile)) as matrix:
        for number, panel in ((number, panel) for number in count() for panel in ordered):
            if seen >= rollouts:
                return
            if (*panel.key, number) in known:
                continue
            one = matrix.judge(panel, number)
            seen += one.rollouts
            if progress:
                progress(seen, max(seen, rollouts))
            yield one


def read_judged(record: Path) -> list[Judged]:
    """Return the honest submissions in a record of trials."""
    if not record.exists():
        return []
    rows = (json.loads(line) for line in record.read_text().splitlines())
    return [
        Judged(**{name: value for name, value in row.items() if name != "honest"})
        for row in rows
        if "prompts" in row
    ]
