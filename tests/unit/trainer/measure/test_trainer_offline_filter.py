"""The offline filter: kept problems and records, which a kill does not change."""

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from trainer_fakes import make_recipe

from muster.inference import Completion, Request
from muster.protocol.errors import ConfigError, EngineError, NotYet, StorageError
from muster.protocol.ids import PolicyVersion
from muster.protocol.prompts import Prompt, text_of
from muster.protocol.recipe import ProofRecipe
from muster.tasks import Grade, Problem, TaskSet, Undecided, verify_all
from muster.tasks.document import SetPart
from muster.tasks.toys import make_sort
from muster.telemetry import LoggedProgress
from muster.trainer.cli import tasks_filter
from muster.trainer.measure import evaluate
from muster.trainer.measure.pass_rates import Band, PassRecord, Sampling, kept_set, measure

RECIPE = """
name = "filter"
[sampling]
problems_per_submission = 2
samples_per_problem = 4
temperature = 1.0
max_new_tokens = 6
[training]
submissions_per_step = 2
"""


@dataclass
class SkilledEngine:
    """Solves problem i in the first i of its samples; fails once after `fails_after` batches."""

    fails_after: int = 10**9
    asked: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    loads: int = 0

    def load_policy(self, _folder: Path, _version: PolicyVersion) -> None:
        self.loads += 1

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(text_of(text).encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def generate(self, requests: Sequence[Request], **_: ProofRecipe) -> list[Completion]:
        if len(self.asked) >= self.fails_after:
            raise EngineError("the machine went away")
        self.asked.append(len(requests))
        self.seeds += [request.seed for request in requests]
        made, count = [], dict[tuple[int, ...], int]()
        for request in requests:
            number = int(bytes(request.prompt_tokens))
            sample = count.get(request.prompt_tokens, 0)
            count[request.prompt_tokens] = sample + 1
            made.append(Completion(tuple(b"yes" if sample < number else b"no"), []))
        return made


def _problems(count: int = 9, task_type: str = "exact_match") -> TaskSet:
    return TaskSet.of(
        "t",
        "1",
        [
            Problem(
                problem_id=f"p{i}", task_type=task_type, prompt=str(i), gold_standard_solution="yes"
            )
            for i in range(count)
        ],
    )


def _model(folder: Path, name: str = "model") -> Path:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text("{}")
    (folder / name / "model.safetensors").write_bytes(name.encode())
    return folder / name


PLAN = Sampling(make_recipe(), passes=8, batch=2)


def _measure(
    folder: Path, engine: SkilledEngine | None = None, plan: Sampling = PLAN, **changes: Any
) -> list[PassRecord]:
    values: dict[str, Any] = {"model": _model(folder), "task_set": _problems(), **changes}
    return measure(
        values["task_set"],
        engine or SkilledEngine(),  # type: ignore[arg-type]
        values["model"],
        plan,
        records=folder / "records.jsonl",
    )


def test_records_say_how_often_each_problem_was_solved(tmp_path: Path) -> None:
    found = _measure(tmp_path)
    assert [(r.problem_id, r.k, r.successes) for r in found] == [(f"p{i}", 8, i) for i in range(9)]
    assert {r.verifier_version for r in found} == {"exact_match 2"}
    header, *lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(header)["model_hash"] == json.loads(lines[0])["model_hash"]
    assert len(lines) == 9


def test_band_keeps_both_of_its_ends(tmp_path: Path) -> None:
    kept = kept_set(_problems(), _measure(tmp_path), Band.parse("0.125:0.5"))
    assert [problem.problem_id for problem in kept] == ["p1", "p2", "p3", "p4"]
    assert kept.version == "1, pass rate 0.125 to 0.5"


@pytest.mark.parametrize("text", ["0.5", "0.5:0.1", "-1:1", "0:2", "a:b", "0:nan", "0:1:2"])
def test_band_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not"):
        Band.parse(text)


def test_band_without_problems_is_refused(tmp_path: Path) -> None:
    records = _measure(tmp_path)[:1]
    with pytest.raises(ConfigError, match="no problem of 't' has a pass rate"):
        kept_set(_problems(1), records, Band(0.9, 1.0))


def test_kept_problems_stay_in_their_parts(tmp_path: Path) -> None:
    parts = (SetPart("low", "t 1", 4), SetPart("high", "t 1", 5))
    tasks = TaskSet.of("t", "1", _problems(), parts)
    records = _measure(tmp_path, task_set=tasks)
    kept = kept_set(tasks, records, Band.parse("0.25:0.625"))
    assert [(part.name, part.count) for part in kept.parts] == [("low", 2), ("high", 2)]
    with pytest.raises(ConfigError, match="no problem of part 'high' of 't' has a pass rate"):
        kept_set(tasks, records, Band(0.0, 0.25))


def test_problem_that_could_not_be_graded_is_not_kept() -> None:
    record = PassRecord("p", 8, 4, 1, "0x", "v 1")
    assert not Band(0.0, 1.0).holds(record)


def _disturbed(monkeypatch: pytest.MonkeyPatch, grade: Undecided, *, times: int) -> None:
    """Give the first answer of the next gradings this grade; then grade as ever."""
    left = [grade] * times

    def graded(answers: Sequence[tuple[Problem, str]]) -> list[Grade]:
        found = verify_all(answers)
        return [left.pop(), *found[1:]] if left else found

    monkeypatch.setattr(evaluate, "verify_all", graded)


def test_trouble_of_this_machine_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _measure(tmp_path)
    path = tmp_path / "records.jsonl"
    data = path.read_bytes()
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:3]))
    _disturbed(monkeypatch, Undecided("no memory", is_disturbance=True), times=2)
    with pytest.raises(NotYet, match="problem 3 and those after it are not measured: no memory"):
        _measure(tmp_path)
    assert len(path.read_bytes().splitlines()) == 3
    assert _measure(tmp_path) == whole
    assert path.read_bytes() == data


def test_trouble_that_passes_is_graded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _disturbed(monkeypatch, Undecided("no memory", is_disturbance=True), times=1)
    assert not any(record.undecided for record in _measure(tmp_path))


def test_answer_that_no_machine_can_grade_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _disturbed(monkeypatch, Undecided("the verifier raised KeyError"), times=1)
    assert [record.undecided for record in _measure(tmp_path)] == [1, *[0] * 8]


def test_every_sample_has_a_seed_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    one, two, other = SkilledEngine(), SkilledEngine(), SkilledEngine()
    for engine, name, seed in ((one, "a", 0), (two, "b", 0), (other, "c", 1)):
        (tmp_path / name).mkdir()
        _measure(tmp_path / name, engine, Sampling(make_recipe(), 8, seed=seed, batch=2))
    assert one.seeds == two.seeds
    assert len(set(one.seeds)) == 72
    assert not set(one.seeds) & set(other.seeds)


@pytest.mark.parametrize("cut", range(0, 2000, 400))
def test_measurement_that_was_cut_off_ends_with_the_same_bytes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "records.jsonl"
    whole = _measure(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data))])
    engine = SkilledEngine()
    assert _measure(tmp_path, engine) == whole
    assert path.read_bytes() == data
    assert len(engine.asked) < 5 or cut < 900


def test_complete_measurement_does_not_even_load_the_model(tmp_path: Path) -> None:
    whole, engine = _measure(tmp_path), SkilledEngine()
    assert _measure(tmp_path, engine) == whole
    assert (engine.loads, engine.asked) == (0, [])


def test_what_was_measured_before_a_failure_stays(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        _measure(tmp_path, SkilledEngine(fails_after=2))
    engine = SkilledEngine()
    assert len(_measure(tmp_path, engine)) == 9
    assert len(engine.asked) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "model_hash is"),
        ({"task_set": _problems(8)}, "task_set_hash is"),
        ({"plan": Sampling(make_recipe(), passes=4, batch=2)}, "passes is 8, not 4"),
        ({"plan": Sampling(make_recipe(), passes=8, seed=1, batch=2)}, "seed is 0, not 1"),
        ({"plan": Sampling(make_recipe(), passes=8, batch=2, dtype="bfloat16")}, "dtype is"),
    ],
)
def test_records_of_another_measurement_are_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    _measure(tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    if "model" in change:
        change = {"model": _model(tmp_path, change["model"])}
    with pytest.raises(ConfigError, match=reason):
        _measure(tmp_path, **change)
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_file_that_holds_no_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("my notes\n")
    with pytest.raises(ConfigError, match="its first line does not describe a measurement"):
        _measure(tmp_path)
    assert (tmp_path / "records.jsonl").read_text() == "my notes\n"


def test_damaged_record_is_named(tmp_path: Path) -> None:
    _measure(tmp_path)
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"successes": 3', b'"successes" 3'))
    with pytest.raises(StorageError, match="is damaged"):
        _measure(tmp_path)


def test_second_process_is_refused(tmp_path: Path) -> None:
    class Greedy(SkilledEngine):
        def generate(self, requests: Sequence[Request], **proof: ProofRecipe) -> list[Completion]:
            with pytest.raises(ConfigError, match="is in use by another process"):
                _measure(tmp_path)
            return super().generate(requests, **proof)

    assert len(_measure(tmp_path, Greedy())) == 9


def test_progress_without_a_terminal_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = LoggedProgress("problems measured", every_s=3600)
    for done in range(0, 101, 10):
        told(done, 100)
    assert [record.done for record in caplog.records] == [0, 100]  # type: ignore[attr-defined]


# -------------------------------------------------------------- the command, with a real model


def _files(folder: Path, model: Path) -> list[str]:
    (folder / "tasks.jsonl").write_bytes(make_sort(24, 3).to_bytes())
    (folder / "recipe.toml").write_text(RECIPE)
    return [
        "--set", str(folder / "tasks.jsonl"), "--model", str(model), "--batch", "2",
        "--recipe", str(folder / "recipe.toml"), "--keep", "0:1",
    ]  # fmt: skip


def test_command_writes_the_kept_problems_and_the_counts(
    tmp_path: Path, model_folder: Path
) -> None:
    out = tmp_path / "kept.jsonl"
    words = [*_files(tmp_path, model_folder), "--out", str(out), "--json"]
    result = CliRunner().invoke(tasks_filter, words)
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert (counts["problems"], counts["kept"], counts["undecided"]) == (24, 24, 0)
    assert len(TaskSet.from_bytes(out.read_bytes())) == 24
    assert out.with_name("kept.jsonl.passes.jsonl").exists()


def test_killed_command_goes_on_where_it_was(tmp_path: Path, model_folder: Path) -> None:
    files = _files(tmp_path, model_folder)
    plain = tmp_path / "plain.jsonl"
    result = CliRunner().invoke(tasks_filter, [*files, "--out", str(plain)])
    assert result.exit_code == 0, result.output
    out = tmp_path / "killed.jsonl"
    records = out.with_name("killed.jsonl.passes.jsonl")
    command = [sys.executable, "-m", "muster.app", "tasks", "filter", *files, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (records.exists() and records.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    result = CliRunner().invoke(tasks_filter, [*files, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert records.read_bytes() == plain.with_name("plain.jsonl.passes.jsonl").read_bytes()
    assert out.read_bytes() == plain.read_bytes()
