"""Pass rates from a run's own rollouts: what its workers sampled, and its validators accepted.

A network measures a task set by running: version 0 of a run is the base model, and every accepted
rollout of it is one pass at a problem whose reward k of n validators graded again. Which files
count is read from the chain, and each file is compared with the hash that is there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from muster.chain import Chain, ChainView, RunView, read_view
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord
from muster.protocol.rollouts import decode_rollouts
from muster.tasks import TaskSet
from muster.telemetry.progress import Progress
from muster.trainer.pass_records import SCHEMA_VERSION, PassRecord

PASSING = 1.0
"""Score from which a sample counts as passed."""


@dataclass(slots=True)
class Passes:
    """What the accepted rollouts of one policy say."""

    files: int = 0
    """Files that were counted."""
    missing: int = 0
    """Accepted files that are not in the folder."""
    samples: Counter[str] = field(default_factory=Counter)
    """Samples by problem."""
    successes: Counter[str] = field(default_factory=Counter)
    """Right samples by problem."""


async def read_run(rpc: str, deployments: Path, run_id: int) -> tuple[RunView, list[OutcomeRecord]]:
    """Return a run and the records that are accepted in it, from the chain.

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
) -> Passes:
    """Return the passes in the accepted files of a policy version that `folder` holds.

    Raises ConfigError for a file that is not the accepted one.
    """
    found = Passes()
    chosen = [record for record in records if record.policy_version == version]
    for number, record in enumerate(chosen, start=1):
        path = folder / f"{record.file_hash.hex()}.parquet"
        if path.is_file():
            _count(path, record, found)
        else:
            found.missing += 1
        on_progress(number, len(chosen))
    return found


def _count(path: Path, record: OutcomeRecord, found: Passes) -> None:
    data = path.read_bytes()
    try:
        if file_hash(data) != record.file_hash:
            raise EncodingError("its hash is another")
        rollouts = decode_rollouts(data)
    except EncodingError as error:
        raise ConfigError(f"{path} is not the file that was accepted: {error}") from error
    found.files += 1
    for rollout in rollouts:
        found.samples[rollout.problem_id] += 1
        found.successes[rollout.problem_id] += rollout.task_reward >= PASSING


def pass_records(
    task_set: TaskSet, found: Passes, run: RunView, version: PolicyVersion, *, least: int
) -> list[PassRecord]:
    """Return the record of every problem, those with fewer than `least` samples as undecided.

    Raises ConfigError when the task set is not the run's.
    """
    if task_set.hash() != run.config.task_set_hash:
        raise ConfigError(
            f"run {run.run_id} pins the task set {hex0x(run.config.task_set_hash)}, this one is "
            f"{hex0x(task_set.hash())}",
            hint="give the run's: its documents folder has it under that name",
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
    """Write a header that says what was counted, and the records, a line each."""
    header = {
        "schema_version": SCHEMA_VERSION,
        "run": run.run_id,
        "policy_version": version,
        "task_set_hash": hex0x(run.config.task_set_hash),
    }
    lines = [header, *map(asdict, records)]
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
    part.replace(path)
