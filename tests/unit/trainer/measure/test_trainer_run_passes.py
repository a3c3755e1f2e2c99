"""Pass rates from accepted rollouts: counted samples, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.protocol.encoding import file_hash
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.tasks.toys import make_sort
from muster.trainer.measure.pass_rates import (
    Band,
    count_passes,
    kept_set,
    pass_records,
    write_records,
)

TASKS = make_sort(4, seed=0)
V0, V1 = PolicyVersion(0), PolicyVersion(1)


def rollouts(problem: int, rewards: str) -> list[Rollout]:
    return [
        Rollout(
            problem_id=TASKS[problem].problem_id,
            group=0,
            sample=n,
            sampling_seed=n,
            target_length=-1,
            policy_version=0,
            prompt_tokens=(1,),
            completion_tokens=(2,),
            proofs=b"",
            task_reward=float(reward) / 2,
        )
        for n, reward in enumerate(rewards)
    ]


def accepted(folder: Path, index: int, problem: int, rewards: str) -> OutcomeRecord:
    """Store a file; a reward of 2 is right, 1 is half of it."""
    data = encode_rollouts(rollouts(problem, rewards))
    (folder / f"{file_hash(data).hex()}.parquet").write_bytes(data)
    return OutcomeRecord(
        worker_id=1,
        step=1,  # type: ignore[arg-type]
        index=index,
        policy_version=V0,
        file_hash=file_hash(data),
        rollouts=len(rewards),
        units=1,
        verdict=Verdict.ACCEPTED,
        reason=Reason.NONE,
    )


def run_of(tasks: Any = TASKS) -> Any:
    config = SimpleNamespace(
        task_set_hash=tasks.hash(), base_model_hash=Hash32(b"m" * 32), recipe_hash=Hash32(b"r" * 32)
    )
    checkpoint = SimpleNamespace(manifest_root=Hash32(b"1" * 32))
    return SimpleNamespace(run_id=7, config=config, checkpoints={V1: checkpoint})


def test_accepted_samples_become_records(tmp_path: Path) -> None:
    records = [
        accepted(tmp_path, 0, 0, "2200"),
        accepted(tmp_path, 1, 0, "0010"),
        accepted(tmp_path, 2, 1, "0000"),
        accepted(tmp_path, 3, 2, "22"),
        replace(accepted(tmp_path, 4, 3, "2222"), policy_version=V1),
    ]
    told: list[tuple[int, int]] = []
    passes = count_passes(records, V0, tmp_path, lambda done, of: told.append((done, of)))
    assert (passes.files, passes.missing, told[-1]) == (4, 0, (4, 4))
    found = pass_records(TASKS, passes, run_of(), V0, least=4)
    assert [(r.k, r.successes, r.rate) for r in found] == [
        (8, 2, 0.25),
        (4, 0, 0.0),
        (2, 2, None),
        (0, 0, None),
    ]
    assert found[0].model_hash == "0x" + b"m".hex() * 32
    assert list(kept_set(TASKS, found, Band(0.1, 0.5))) == [TASKS[0]]
    write_records(tmp_path / "out", found, run_of(), V0)
    header, *lines = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (header["run"], header["policy_version"], len(lines)) == (7, 0, 4)


def test_later_policy_is_named_by_its_root(tmp_path: Path) -> None:
    records = [replace(accepted(tmp_path, 0, 3, "2222"), policy_version=V1)]
    found = pass_records(TASKS, count_passes(records, V1, tmp_path), run_of(), V1, least=1)
    assert (found[3].rate, found[3].model_hash) == (1.0, "0x" + b"1".hex() * 32)


def test_missing_file_is_counted_and_a_forged_one_refused(tmp_path: Path) -> None:
    record = accepted(tmp_path, 0, 0, "22")
    (path,) = tmp_path.iterdir()
    path.write_bytes(encode_rollouts(rollouts(0, "20")))
    with pytest.raises(ConfigError, match="is not the file that was accepted: its hash"):
        count_passes([record], V0, tmp_path)
    path.unlink()
    assert count_passes([record], V0, tmp_path).missing == 1


def test_accepted_file_that_is_no_file_of_rollouts_is_refused(tmp_path: Path) -> None:
    data = b"junk"
    (tmp_path / f"{file_hash(data).hex()}.parquet").write_bytes(data)
    record = replace(accepted(tmp_path, 0, 0, "22"), file_hash=file_hash(data))
    with pytest.raises(ConfigError, match="is not the file that was accepted"):
        count_passes([record], V0, tmp_path)


def test_another_task_set_is_refused(tmp_path: Path) -> None:
    passes = count_passes([], V0, tmp_path)
    with pytest.raises(ConfigError, match="run 7 pins the task set"):
        pass_records(TASKS, passes, run_of(make_sort(4, seed=1)), V0, least=1)
