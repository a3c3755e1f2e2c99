"""`muster data judge`: replies about the rows that a judge graded are written and checked."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from worlds.judge_world import LIMITS, build_judge
from worlds.traces import ALL, RECIPE, Traces, rollout, save_tokenizer, tokens

from muster.client.cli.data import judge_command
from muster.client.dataset.export import export_rows
from muster.client.dataset.folder import DataFolder
from muster.client.dataset.opinions import NAME
from muster.client.dataset.rows import RowMaker, Texts
from muster.client.dataset.selection import HeldOut, Selection
from muster.inference.engine_judge import EngineJudge
from muster.protocol.recipe import ProofRecipe
from muster.tasks import Problem, TaskSet
from muster.tasks.judge import judge_prompt, parse_score

pytestmark = pytest.mark.asyncio
Line = dict[str, Any]

JUDGED, COMPARED = "llm_judgeable", "llm_judgeable_groundtruth_similarity"
TASKS = TaskSet.of(
    "judged",
    "1",
    [
        Problem(problem_id="p0", task_type=JUDGED, prompt="0="),
        Problem(problem_id="p1", task_type=COMPARED, prompt="1=", gold_standard_solution="11"),
        Problem(problem_id="p2", task_type="exact_match", prompt="2=", gold_standard_solution="2"),
    ],
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def answers(judge: Path) -> dict[str, list[tuple[str, float]]]:
    """Answers to two problems that the judge scores, with their scores."""
    model = EngineJudge.load(judge)
    return {name: list(scored(model, gold)) for name, gold in (("0", None), ("1", "11"))}


def scored(judge: EngineJudge, gold: str | None) -> Iterator[tuple[str, float]]:
    name = "0" if gold is None else "1"
    texts = [f"{name}{n}" for n in range(10, 60)]
    replies = judge.opinions([judge_prompt(f"{name}=", gold, text) for text in texts])
    for text, reply in zip(texts, replies, strict=True):
        if (score := parse_score(reply.text)) is not None:
            yield text, score / 100


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    made = Traces(tmp_path)
    made.maker = RowMaker(RECIPE, TASKS, Texts(save_tokenizer(tmp_path / "model")))
    (tmp_path / "limits.json").write_bytes(LIMITS.to_bytes())
    TASKS.write(tmp_path / "tasks.jsonl")
    return made


async def export(traces: Traces, answers: dict[str, list[tuple[str, float]]]) -> DataFolder:
    """Write a data set: two judged rows of each kind, and one that is compared exactly."""
    said = [(int(name), *found) for name in answers for found in answers[name][:2]]
    said.append((2, "2", 1.0))
    for problem, text, reward in said:
        traces.add(rollout(problem, tokens(text), reward, 0))
    folder = traces.data_folder(ALL)
    selection = Selection(ALL, HeldOut())
    await export_rows(folder, traces.stream, traces.maker, selection, traces.find_file)
    return folder


def judged(folder: DataFolder, judge: Path, *more: str) -> Result:
    words = [str(folder.path), "--judge", str(judge)]
    tasks = ["--task-set", str(folder.path.parent / "tasks.jsonl")]
    return CliRunner().invoke(judge_command, [*words, *tasks, *more])


def examined(folder: DataFolder, judge: Path) -> Result:
    return judged(folder, judge, "--check", str(folder.path.parent / "limits.json"))


async def test_who_has_the_judge_writes_its_replies_and_another_examines_them(
    traces: Traces, answers: dict[str, list[tuple[str, float]]], judge: Path
) -> None:
    folder = await export(traces, answers)
    written = judged(folder, judge)
    assert written.exit_code == 0, written.output
    assert "ok   rewards: the judge gives 4 rows their rewards" in written.stdout
    found = examined(folder, judge)
    assert found.exit_code == 0, found.output
    assert "ok   opinions: 4 replies are the judge's" in found.stdout
    assert "ok   rewards: they give 4 rows their rewards" in found.stdout


async def test_a_reward_that_the_judge_did_not_give_is_found(
    traces: Traces, answers: dict[str, list[tuple[str, float]]], judge: Path
) -> None:
    text, reward = answers["0"][0]
    folder = await export(traces, {"0": [(text, reward + 0.01)], "1": answers["1"]})
    for found in (judged(folder, judge), examined(folder, judge)):
        assert found.exit_code == 1
        assert f"FAIL rewards: row 0 of place 0 of the stream has {reward + 0.01:g}" in found.stdout
        assert f"the judge gives {reward:g}" in found.stdout


def other_token(lines: list[Line]) -> None:
    lines[1]["tokens"][0] = (lines[1]["tokens"][0] + 1) % 16


def impossible_token(lines: list[Line]) -> None:
    lines[1]["tokens"][0] = 1 << 40


def negative_token(lines: list[Line]) -> None:
    lines[1]["tokens"][0] = -1


def other_text(lines: list[Line]) -> None:
    lines[1]["text"] = '{"score": 99}'


def no_text(lines: list[Line]) -> None:
    lines[1]["text"] = 5


def without_proofs(lines: list[Line]) -> None:
    lines[1]["proofs"] = []


def proof_of_another(lines: list[Line]) -> None:
    lines[1]["proofs"] = lines[2]["proofs"]


def swapped(lines: list[Line]) -> None:
    lines[1], lines[2] = lines[2], lines[1]


def fewer(lines: list[Line]) -> None:
    lines.pop()


def more(lines: list[Line]) -> None:
    lines.append(lines[-1])


def no_tokens(lines: list[Line]) -> None:
    del lines[1]["tokens"]


def other_data(lines: list[Line]) -> None:
    lines[0]["data"] = "0x" + "00" * 32


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_token, "the text is not that of the tokens"),
        (impossible_token, "a token that the model does not have"),
        (negative_token, "a token that the model does not have"),
        (other_text, "the text is not that of the tokens"),
        (no_text, "has another line where row 0 of place 0"),
        (without_proofs, "its proofs: "),
        (proof_of_another, "its proofs are not of this model's hidden states"),
        (swapped, "has another line where row 0 of place 0"),
        (fewer, "ends before row 0 of place 3"),
        (more, "more than the 4 rows that were judged"),
        (no_tokens, "has a malformed line where row 0 of place 0"),
        (other_data, "is about another data set, or of another judge"),
    ],
)
async def test_a_changed_file_is_refused(
    traces: Traces,
    answers: dict[str, list[tuple[str, float]]],
    judge: Path,
    change: Callable[[list[Line]], None],
    why: str,
) -> None:
    folder = await export(traces, answers)
    assert judged(folder, judge).exit_code == 0
    path = folder.path / NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    packed = [json.dumps(line, separators=(",", ":"), sort_keys=True) for line in lines]
    path.write_text("".join(f"{line}\n" for line in packed))
    found = examined(folder, judge)
    assert found.exit_code == 1, found.output
    assert why in found.stdout


async def test_another_models_replies_are_refused_whatever_the_file_says_of_them(
    traces: Traces, answers: dict[str, list[tuple[str, float]]], judge: Path, tmp_path: Path
) -> None:
    folder = await export(traces, answers)
    judged(folder, judge)
    header, _, _ = (folder.path / NAME).read_text().partition("\n")
    judged(folder, build_judge(tmp_path / "other", seed=1))
    _, _, lines = (folder.path / NAME).read_text().partition("\n")
    assert "is about another data set, or of another judge" in examined(folder, judge).stdout
    # The file's author can write any first line.
    (folder.path / NAME).write_text(f"{header}\n{lines}")
    found = examined(folder, judge)
    assert found.exit_code == 1
    assert "its proofs are not of this model's hidden states" in found.stdout


async def test_what_cannot_be_examined_is_said(
    traces: Traces, answers: dict[str, list[tuple[str, float]]], judge: Path, tmp_path: Path
) -> None:
    folder = await export(traces, answers)
    unwritten = examined(folder, judge)
    assert "cannot read" in str(unwritten.exception)
    other = LIMITS.model_copy(update={"proof": ProofRecipe(topk=64)})
    (tmp_path / "limits.json").write_bytes(other.to_bytes())
    assert "was measured with other proofs" in str(examined(folder, judge).exception)
    plain = CliRunner().invoke(judge_command, [str(folder.path), "--judge", str(judge)])
    assert "'p1' is judged by a reference answer" in str(plain.exception)
    assert not (folder.path / NAME).exists()


async def test_a_data_set_without_judged_rows_has_no_opinions(traces: Traces, judge: Path) -> None:
    folder = await export(traces, {})
    assert "no row of the data set has a reward of a judge" in str(judged(folder, judge).exception)
    assert not (folder.path / NAME).exists()
