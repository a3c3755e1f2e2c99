"""Pass rates: how often a model solves each problem of a task set, and the problems kept for it.

INTELLECT-2 kept problems with pass@8 between 12.5 % and 50 % (arXiv 2505.07291, section 3). Pass
rates come from one of two places:

* `measure` samples every problem k times. It writes records, one JSON line a problem, in whole
  batches: after a kill it resumes and ends with the same bytes. The first line says what is
  measured; a file of another measurement is refused.
* `count_passes` reads a run's own rollouts. Version 0 of a run is the base model, and each of its
  accepted rollouts is one pass at a problem; k of n validators confirmed its reward. The chain says
  which files count, and each file is compared with its hash there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import Any

from muster.chain import Chain, ChainView, RunView, read_view
from muster.inference import InferenceEngine
from muster.lifecycle.files import write_durably
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ConfigError, EncodingError, StorageError
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord
from muster.protocol.recipe import PromptRecipe, Recipe
from muster.protocol.rollouts import decode_rollouts
from muster.shardcast import state_hash
from muster.tasks import Graded, Problem, TaskSet, identities
from muster.telemetry import Progress
from muster.trainer.measure.evaluate import (
    PASSING,
    AskedProblem,
    asked_of,
    play_and_grade,
    require_undisturbed,
)
from muster.trainer.publish.policies import BASE, policy_files

SCHEMA_VERSION = 1
"""Version of the file format."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Result of one problem."""

    problem_id: str
    k: int
    """Samples that were graded."""
    successes: int
    """Samples that were right."""
    undecided: int
    """Samples that could not be graded; if there are any, the problem has no pass rate."""
    model_hash: str
    """State hash of the model's files."""
    verifier_version: str
    """The verifier's name and version."""

    @property
    def rate(self) -> float | None:
        """Share of right samples; None when a sample could not be graded."""
        return None if self.undecided else self.successes / self.k


@dataclass(frozen=True, slots=True)
class Band:
    """Range of pass rates that are kept, both ends included."""

    low: float
    """Smallest share of right samples."""
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
        """Tell whether a problem is kept; one with ungraded samples is not."""
        return record.rate is not None and self.low <= record.rate <= self.high


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings by which problems are sampled."""

    recipe: Recipe
    """Temperature, length and budgets."""
    passes: int
    """Samples per problem."""
    seed: int = 0
    """Seed from which all sampling seeds are derived."""
    batch: int = 32
    """Problems that are sampled together."""
    dtype: str = "float32"
    """Number format of the model."""


def describe(task_set: TaskSet, model: Path, plan: Sampling) -> dict[str, Any]:
    """Return everything besides the problem that decides a record: the first line of a file of
    records."""
    sampling = plan.recipe.sampling
    verifiers = identities(problem.task_type for problem in task_set)
    prompt = plan.recipe.prompt
    budgets = {p.name: plan.recipe.rules_of(p.name).target_lengths for p in task_set.parts}
    return {
        "schema_version": SCHEMA_VERSION,
        "task_set_hash": hex0x(task_set.hash()),
        "model_hash": hex0x(state_hash(policy_files(model))),
        "passes": plan.passes,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "target_lengths": sampling.target_lengths,
        "seed": plan.seed,
        "batch": plan.batch,
        "dtype": plan.dtype,
        "verifiers": [verifier.model_dump() for verifier in verifiers],
        **({} if prompt == PromptRecipe() else {"prompt": prompt.model_dump()}),
        **({"budgets": budgets} if task_set.parts else {}),
    }


def measure(
    task_set: TaskSet,
    engine: InferenceEngine,
    model: Path,
    plan: Sampling,
    *,
    records: Path,
    on_progress: Progress = lambda _done, _total: None,
) -> list[PassRecord]:
    """Return every problem's record; measure those that `records` does not hold yet.

    Raises ConfigError when `records` is in use or belongs to another measurement, StorageError when
    it cannot be written, EngineError when the model fails, NotYet when this machine could not grade
    a sample: then the batch is not written.
    """
    header, size = describe(task_set, model, plan), len(task_set)
    names = {v["task_type"]: f"{v['name']} {v['version']}" for v in header["verifiers"]}
    with _locked(records) as file:
        found = _read(file, records, header, size)
        on_progress(len(found), size)
        if len(found) < size:
            engine.load_policy(model, BASE)
        for start in range(len(found), size, plan.batch):
            batch = range(start, min(start + plan.batch, size))
            chosen = asked_of(plan.recipe, task_set, batch)
            made = []
            for (_, problem, _), (successes, undecided) in zip(
                chosen, _outcomes(chosen, engine, plan), strict=True
            ):
                by_whom = header["model_hash"], names[problem.task_type]
                record = PassRecord(problem.problem_id, plan.passes, successes, undecided, *by_whom)
                made.append(record)
            _append(file, records, made)
            found += made
            on_progress(len(found), size)
        return found


def kept_set(task_set: TaskSet, records: Sequence[PassRecord], band: Band) -> TaskSet:
    """Return the problems in the band, in their order; raises ConfigError when there are none, in
    the set or in a part of it.
    """
    kept = [place for place, record in enumerate(records) if band.holds(record)]
    left = {task_set.part_at(place) for place in kept}
    for part in [each.name for each in task_set.parts] or [""]:
        if part not in left:
            of = f"part {part!r} of {task_set.name!r}" if part else repr(task_set.name)
            raise ConfigError(
                f"no problem of {of} has a pass rate in [{band.low}, {band.high}]",
                hint="widen the range of --keep; the records file holds the pass rates",
            )
    version = f"{task_set.version}, pass rate {band.low} to {band.high}"
    return task_set.only(kept, version[:128])


def _outcomes(
    chosen: Sequence[AskedProblem], engine: InferenceEngine, plan: Sampling
) -> Iterator[tuple[int, int]]:
    """Yield for each chosen problem how many samples were right, and how many undecided."""

    def name(_index: int, sample: int, problem: Problem) -> str:
        return f"filter {plan.seed} {sample} {problem.problem_id}"

    rows = play_and_grade(engine, plan.recipe, chosen, plan.passes, name)
    first = chosen[0].place + 1
    require_undisturbed(rows, f"problem {first} and those after it are not measured")
    for row in rows:
        scores = [grade.score for _, grade in row if isinstance(grade, Graded)]
        yield sum(score >= PASSING for score in scores), len(row) - len(scores)


# A file of records


@contextmanager
def _locked(path: Path) -> Iterator[BufferedRandom]:
    """Open a file for this process alone; raises ConfigError when it is in use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{path} is in use by another process") from error
        yield file


def _read(
    file: BufferedRandom, path: Path, header: dict[str, Any], problems: int
) -> list[PassRecord]:
    """Return the records of whole batches, in the order of the task set, and cut off an incomplete
    rest. Raises ConfigError when the file belongs to another measurement.
    """
    first = _line(header)
    lines = file.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if whole and whole[0] != first:
        raise ConfigError(
            f"{path} holds another measurement: {_difference(whole[0], first)}",
            hint="choose another file with --records, or delete this file",
        )
    # An incomplete batch is measured again as a whole; the last batch of the set may be short.
    count = min(len(whole) - 1, problems)
    if count < problems:
        count -= count % header["batch"]
    kept = whole[1 : 1 + max(0, count)]
    records = [_record(path, line) for line in kept]
    # Only the end of the file changes: measured records must survive a kill at this very moment.
    end = sum(map(len, [first, *kept])) if whole else 0
    file.truncate(end)
    file.seek(end)
    if not whole:
        _write(file, first)
    return records


def _append(file: BufferedRandom, path: Path, records: Sequence[PassRecord]) -> None:
    """Append a batch; it is on disk when this returns. Raises StorageError when the write fails."""
    try:
        _write(file, b"".join(_line(asdict(record)) for record in records))
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}",
            hint="free some disk space, then run the same command again to resume",
        ) from error


def _record(path: Path, line: bytes) -> PassRecord:
    try:
        return PassRecord(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{path} is damaged: {line[:80]!r}", hint="delete the file and measure again"
        ) from error


def _write(file: BufferedRandom, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def _difference(found: bytes, wanted: bytes) -> str:
    try:
        old, new = json.loads(found), json.loads(wanted)
        name = next(name for name in new if old.get(name) != new[name])
        return f"{name} is {str(old.get(name))[:80]}, not {str(new[name])[:80]}"
    except (ValueError, AttributeError, StopIteration):
        return "its first line does not describe a measurement"


@dataclass(slots=True)
class PassCounts:
    """Counts over the accepted rollouts of one policy."""

    files: int = 0
    """Files that were counted."""
    missing: int = 0
    """Accepted files that are not in the folder."""
    samples: Counter[str] = field(default_factory=Counter)
    """Samples by problem."""
    successes: Counter[str] = field(default_factory=Counter)
    """Right samples by problem."""


async def read_run(rpc: str, deployments: Path, run_id: int) -> tuple[RunView, list[OutcomeRecord]]:
    """Return a run and its accepted records, from the chain.

    Raises ConfigError when there is no such run, ChainError when the chain does not answer.
    """
    async with await Chain.connect(rpc, deployments) as chain:
        view = await read_view(chain, ChainView())
    run = view.runs.get(RunId(run_id))
    if run is None:
        raise ConfigError(f"there is no run {run_id} on this chain", hint="check --run and --rpc")
    return run, [item.record for item in view.training_stream(run.run_id)]


def count_passes(
    records: Iterable[OutcomeRecord],
    version: PolicyVersion,
    folder: Path,
    on_progress: Progress = lambda _done, _of: None,
) -> PassCounts:
    """Return the passes in the accepted files of a policy version that `folder` holds.

    Raises ConfigError for a file that is not the accepted one.
    """
    found = PassCounts()
    chosen = [record for record in records if record.policy_version == version]
    for number, record in enumerate(chosen, start=1):
        path = folder / f"{record.file_hash.hex()}.parquet"
        if path.is_file():
            _count(path, record, found)
        else:
            found.missing += 1
        on_progress(number, len(chosen))
    return found


def _count(path: Path, record: OutcomeRecord, found: PassCounts) -> None:
    data = path.read_bytes()
    try:
        if file_hash(data) != record.file_hash:
            raise EncodingError("its hash differs")
        rollouts = decode_rollouts(data)
    except EncodingError as error:
        raise ConfigError(f"{path} is not the file that was accepted: {error}") from error
    found.files += 1
    for rollout in rollouts:
        found.samples[rollout.problem_id] += 1
        found.successes[rollout.problem_id] += rollout.task_reward >= PASSING


def pass_records(
    task_set: TaskSet, found: PassCounts, run: RunView, version: PolicyVersion, *, least: int
) -> list[PassRecord]:
    """Return every problem's record; one with fewer than `least` samples counts as undecided.

    Raises ConfigError when the task set is not the run's.
    """
    if task_set.hash() != run.config.task_set_hash:
        raise ConfigError(
            f"run {run.run_id} pins the task set {hex0x(run.config.task_set_hash)}, the given "
            f"one is {hex0x(task_set.hash())}",
            hint="give the run's task set: the documents folder holds it under its hash",
        )
    model = run.config.base_model_hash if version == 0 else run.checkpoints[version].manifest_root
    by_whom = f"as recipe {hex0x(run.config.recipe_hash)} pins it"
    records = []
    for problem in task_set:
        k = found.samples[problem.problem_id]
        successes = found.successes[problem.problem_id]
        lacking = max(0, least - k)
        records.append(PassRecord(problem.problem_id, k, successes, lacking, hex0x(model), by_whom))
    return records


def write_records(path: Path, records: list[PassRecord], run: RunView, version: int) -> None:
    """Write a header that says what was counted, and one line per record."""
    header = {
        "schema_version": SCHEMA_VERSION,
        "run": run.run_id,
        "policy_version": version,
        "task_set_hash": hex0x(run.config.task_set_hash),
    }
    lines = [header, *map(asdict, records)]
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    write_durably(path, text.encode())
