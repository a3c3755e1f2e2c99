"""The offline difficulty filter: sample every problem k times, keep those solved sometimes.

INTELLECT-2 kept problems with pass@8 between 12.5 % and 50 % (arXiv 2505.07291, section 3).
Blocking; what it measures is on disk batch by batch, see `muster.trainer.pass_records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.inference import InferenceEngine, Request
from muster.inference.dialogue import play
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.shardcast import state_hash
from muster.tasks import Graded, Problem, TaskSet, identities, render_prompt
from muster.telemetry.progress import Progress
from muster.trainer.evaluate import grade_played
from muster.trainer.pass_records import Measurement, PassRecord, RecordFile
from muster.trainer.policies import policy_files

BASE = PolicyVersion(0)


@dataclass(frozen=True, slots=True)
class Band:
    """Which pass rates are kept; both ends belong to it."""

    low: float
    """Least share of right samples."""
    high: float
    """Largest share of right samples."""

    @classmethod
    def parse(cls, text: str) -> Band:
        """Read `LOW:HIGH`; raises ConfigError unless 0 <= LOW <= HIGH <= 1."""
        try:
            low, high = (float(part) for part in text.split(":"))
        except ValueError as error:
            raise ConfigError(f"{text!r} is not LOW:HIGH, such as 0.125:0.5") from error
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"{text!r} is not a range of shares: 0 <= LOW <= HIGH <= 1")
        return cls(low, high)

    def holds(self, record: PassRecord) -> bool:
        """Tell whether a problem is kept; one that could not be graded is not."""
        return record.rate is not None and self.low <= record.rate <= self.high


@dataclass(frozen=True, slots=True)
class Sampling:
    """How often and how problems are sampled."""

    recipe: Recipe
    """Temperature, length and budgets."""
    passes: int
    """Samples per problem."""
    seed: int = 0
    """Of all sampling seeds."""
    batch: int = 32
    """Problems that are sampled together."""
    dtype: str = "float32"
    """Number format of the model."""


def describe(task_set: TaskSet, model: Path, plan: Sampling) -> Measurement:
    """Return what a measurement of this model on this task set depends on."""
    sampling = plan.recipe.sampling
    verifiers = identities(problem.task_type for problem in task_set)
    return Measurement(
        task_set_hash=hex0x(task_set.hash()),
        model_hash=hex0x(state_hash(policy_files(model))),
        passes=plan.passes,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        target_lengths=sampling.target_lengths,
        seed=plan.seed,
        batch=plan.batch,
        dtype=plan.dtype,
        verifiers=tuple(verifier.model_dump() for verifier in verifiers),
    )


def measure(
    task_set: TaskSet,
    engine: InferenceEngine,
    model: Path,
    plan: Sampling,
    *,
    records: Path,
    on_progress: Progress = lambda _done, _total: None,
) -> list[PassRecord]:
    """Return every problem's record, measuring those that `records` does not hold yet.

    Raises ConfigError when `records` is of another measurement, EngineError when the model fails.
    """
    made_by = describe(task_set, model, plan)
    names = {v["task_type"]: f"{v['name']} {v['version']}" for v in made_by.verifiers}
    with RecordFile(records, made_by, len(task_set)) as file:
        on_progress(len(file.records), len(task_set))
        if len(file.records) < len(task_set):
            engine.load_policy(model, BASE)
        for start in range(len(file.records), len(task_set), plan.batch):
            chosen = range(start, min(start + plan.batch, len(task_set)))
            outcomes = _sample(task_set, chosen, engine, plan)
            file.append(
                [
                    PassRecord(
                        task_set[i].problem_id,
                        plan.passes,
                        successes,
                        undecided,
                        made_by.model_hash,
                        names[task_set[i].task_type],
                    )
                    for i, (successes, undecided) in zip(chosen, outcomes, strict=True)
                ]
            )
            on_progress(len(file.records), len(task_set))
        return file.records


def kept_set(task_set: TaskSet, records: Sequence[PassRecord], band: Band) -> TaskSet:
    """Return the problems in the band, in their order; raises ConfigError when there are none."""
    kept = [p for p, record in zip(task_set, records, strict=True) if band.holds(record)]
    if not kept:
        raise ConfigError(
            f"no problem of {task_set.name!r} has a pass rate in [{band.low}, {band.high}]",
            hint="widen --keep; the pass rates are in the records",
        )
    version = f"{task_set.version}, pass rate {band.low} to {band.high}"
    return TaskSet.of(task_set.name, version[:128], kept)


def _sample(
    task_set: TaskSet, chosen: range, engine: InferenceEngine, plan: Sampling
) -> list[tuple[int, int]]:
    """Return for each chosen problem how many samples were right, and how many undecided."""
    asked = [(i, task_set[i]) for i in chosen for _ in range(plan.passes)]
    requests = [
        (problem, _request(engine, plan, i, n % plan.passes, problem))
        for n, (i, problem) in enumerate(asked)
    ]
    made = play(engine, requests, proof=plan.recipe.proof)
    grades = grade_played([(p, played) for (_, p), played in zip(asked, made, strict=True)])
    outcomes = []
    for start in range(0, len(grades), plan.passes):
        each = grades[start : start + plan.passes]
        scores = [grade.score for grade in each if isinstance(grade, Graded)]
        outcomes.append((sum(score >= 1.0 for score in scores), len(each) - len(scores)))
    return outcomes


def _request(
    engine: InferenceEngine, plan: Sampling, index: int, sample: int, problem: Problem
) -> Request:
    sampling = plan.recipe.sampling
    lengths = sampling.target_lengths
    target = lengths[index % len(lengths)] if lengths else -1
    name = f"filter {plan.seed} {sample} {problem.problem_id}"
    return Request(
        engine.encode(render_prompt(problem, target)),
        int.from_bytes(keccak(name.encode())[:8], "big"),
        sampling.temperature,
        sampling.max_new_tokens,
    )
