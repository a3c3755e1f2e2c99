"""`muster tasks`: output, files and exit code of each command."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from worlds.chat_world import build_chat_model, make_word_tokenizer

from muster.app.cli import tasks
from muster.protocol.errors import ConfigError, TaskError
from muster.protocol.ids import Hash32
from muster.protocol.seeds import problem_indices
from muster.protocol.set_aside import FILE_NAME, SetAside
from muster.tasks import TaskSet
from muster.tasks.document import LineProof
from muster.tasks.toys import make_sort

TASKS = make_sort(30, seed=0)
CHAT = """
name = "chat"
[sampling]
problems_per_submission = 1
samples_per_problem = 2
temperature = 1.0
max_new_tokens = 8
[training]
submissions_per_step = 1
[prompt]
form = "chat"
thinking = "off"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    TASKS.write(tmp_path / "tasks.jsonl")
    return tmp_path / "tasks.jsonl"


def run(*words: object) -> Result:
    return CliRunner().invoke(tasks, [str(word) for word in words])


def answer(*words: object) -> Any:
    done = run(*words, "--json")
    assert done.exception is None, done.output
    return json.loads(done.stdout)


def test_list_names_verifiers_and_sets_with_their_hashes() -> None:
    found = answer("list")
    exact = next(v for v in found["verifiers"] if v["task_type"] == "exact_match")
    assert len(exact["code_hash"]) == 66
    assert {"sort", "reverse", "arithmetic"} <= {s["set"] for s in found["sets"]}
    assert "verifiable_math" in run("list").stdout


def test_show_prints_the_root_and_the_first_problems(file: Path) -> None:
    found = answer("show", file, "--rows", 2)
    assert (found["root"], found["problems"]) == ("0x" + TASKS.hash().hex(), 30)
    assert [p["problem_id"] for p in found["first"]] == [p.problem_id for p in TASKS.problems[:2]]
    assert TASKS[4].problem_id in run("show", file).stdout


def test_show_proves_a_problem(file: Path) -> None:
    found = answer("show", file, TASKS[11].problem_id, "--proof")
    path = tuple(Hash32(bytes.fromhex(h[2:])) for h in found["proof"]["path"])
    proof = LineProof(found["proof"]["position"], path)
    assert proof.proves(TASKS[11].to_bytes(), TASKS.hash())
    assert not proof.proves(TASKS[12].to_bytes(), TASKS.hash())
    assert found["hash"] == "0x" + TASKS[11].content_hash().hex()
    assert "position" in run("show", file, TASKS[11].problem_id, "--proof").stdout


def test_show_prints_prompts_as_a_model_reads_them(file: Path, tmp_path: Path) -> None:
    build_chat_model(tmp_path / "model", make_word_tokenizer())
    (tmp_path / "recipe.toml").write_text(CHAT)
    asked = ("--recipe", tmp_path / "recipe.toml", "--model", tmp_path / "model")
    found = answer("show", file, TASKS[3].problem_id, *asked)
    (shown,) = found["problems"]
    assert shown["text"] == (
        f"<|im_start|>user\n{TASKS[3].prompt}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert "".join(shown["read"]) == shown["text"]
    assert found["prompt"]["frame"]["begin"] == "<|im_start|>user\n"
    printed = run("show", file, "--rows", 2, *asked).stdout
    assert f"  {TASKS[1].prompt}<|im_end|>" in printed
    assert isinstance(run("show", file, *asked[:2]).exception, ConfigError)


def test_a_strangers_set_does_not_drive_the_terminal(tmp_path: Path) -> None:
    build_chat_model(tmp_path / "model", make_word_tokenizer())
    (tmp_path / "recipe.toml").write_text(CHAT)
    evil = TASKS[0].model_copy(update={"problem_id": "id\x1b[2J", "task_type": "type\x1b[2J"})
    TaskSet.of("evil", "1", [evil]).write(tmp_path / "evil")
    asked = ("--recipe", tmp_path / "recipe.toml", "--model", tmp_path / "model")
    for words in (("show", tmp_path / "evil", *asked), ("check", tmp_path / "evil")):
        shown = run(*words).stdout
        assert "\ufffd[2J" in shown
        assert "\x1b" not in shown


def test_show_refuses_what_is_not_there(file: Path) -> None:
    assert isinstance(run("show", file, "nobody").exception, ConfigError)
    assert isinstance(run("show", file, "--proof").exception, ConfigError)


def test_sample_is_what_the_ticket_draws(file: Path) -> None:
    seed = "0x" + "ab" * 32
    found = answer("sample", file, "--seed", seed, "--count", 5)
    expected = problem_indices(Hash32(bytes.fromhex("ab" * 32)), 5, 30)
    assert [row["index"] for row in found] == expected
    assert TASKS[expected[0]].problem_id in run("sample", file, "--seed", seed).stdout


def test_sample_skips_what_the_ticket_s_policy_sets_aside(file: Path, tmp_path: Path) -> None:
    seed, recipe = "0x" + "ab" * 32, tmp_path / "recipe.toml"
    recipe.write_text(
        'name = "x"\n[sampling]\nproblems_per_submission = 5\nsamples_per_problem = 2\n'
        "temperature = 1.0\nmax_new_tokens = 8\n[training]\nsubmissions_per_step = 1\n"
        "[filters]\npool_window = 4\npool_revisit = 1000\n"
    )
    asked = ("sample", file, "--seed", seed, "--recipe", recipe)
    first = answer(*asked)[0]["index"]
    (tmp_path / "v3").mkdir()
    assert answer(*asked, "--set-aside", tmp_path / "v3")[0]["index"] == first
    (tmp_path / "v3" / FILE_NAME).write_bytes(SetAside.of([first], 30).bits)
    assert first not in [row["index"] for row in answer(*asked, "--set-aside", tmp_path / "v3")]
    (tmp_path / "v3" / FILE_NAME).write_bytes(b"short")
    refused = run(*asked, "--set-aside", tmp_path / "v3").exception
    assert isinstance(refused, ConfigError)
    assert "one bit for each problem" in str(refused)
    without = run("sample", file, "--seed", seed, "--set-aside", tmp_path / "v3").exception
    assert isinstance(without, ConfigError)


@pytest.mark.parametrize(("seed", "count"), [("0x12", 1), ("zz", 1), ("0x" + "ab" * 32, 31)])
def test_sample_refuses_a_seed_or_count_that_cannot_be(file: Path, seed: str, count: int) -> None:
    done = run("sample", file, "--seed", seed, "--count", count)
    assert isinstance(done.exception, ConfigError)


def test_check_ends_with_0_or_with_1(file: Path, tmp_path: Path) -> None:
    assert answer("check", file, "--sample", 3, "--hacked", 1)["admitted"]
    problems = [p.model_copy(update={"gold_standard_solution": None}) for p in TASKS]
    TaskSet.of("no gold", "1", problems).write(tmp_path / "bad")
    done = run("check", tmp_path / "bad", "--sample", 2, "--hacked", 0, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["without_gold"] == 2
    assert report["offences"]["junk scores"]["problem_ids"]
    shown = run("check", tmp_path / "bad", "--sample", 2, "--hacked", 0)
    assert shown.exit_code == 1
    assert "junk scores" in shown.stdout


def test_made_set_is_imported_published_and_imported_again(tmp_path: Path) -> None:
    made = answer("import", "set:sort", "--count", 30, "--out", tmp_path / "a", "--name", "x")
    facts = answer(
        "publish", tmp_path / "a", "--documents", tmp_path / "d", "--parquet", tmp_path / "p"
    )
    assert facts["root"] == made["root"]
    assert (tmp_path / "d" / made["root"][2:]).read_bytes() == (tmp_path / "a").read_bytes()
    assert facts["verifiers"][0]["task_type"] == "exact_match"
    again = answer("import", tmp_path / "p", "--out", tmp_path / "b", "--name", "x")
    assert again["root"] == made["root"]


def test_rows_of_other_columns_are_imported(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text('{"question": "1+1?", "answer": 2, "level": 3}\n')
    words = ("--task-type", "exact_match", "--map", "prompt=question")
    found = answer(
        "import", tmp_path / "rows", *words, "--map", "gold_standard_solution=answer",
        "--out", tmp_path / "t",
    )  # fmt: skip
    assert found["unused_columns"] == ["level"]
    assert TaskSet.open(tmp_path / "t")[0].gold_standard_solution == "2"


def test_bad_rows_refuse_the_import_or_are_left_out(tmp_path: Path) -> None:
    row = {"problem_id": "a", "task_type": "t", "prompt": "p"}
    (tmp_path / "rows").write_text(json.dumps(row) + "\nnonsense\n")
    words = ("import", tmp_path / "rows", "--out", tmp_path / "t")
    done = run(*words)
    assert isinstance(done.exception, TaskError)
    assert "row 2: not JSON" in done.stderr
    assert not (tmp_path / "t").exists()
    assert answer(*words, "--skip-bad")["bad"] == 1
    assert (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("set:sort",),
        ("set:none", "--count", "1"),
        ("x", "--map", "prompt"),
        ("x", "--map", "promt=question"),
    ],
)
def test_import_says_what_is_wrong_with_its_words(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run("import", *words, "--out", tmp_path / "t")
    assert isinstance(done.exception, (ConfigError, TaskError))
    assert done.exception.hint


# Parts


RECIPE_OF_PARTS = """
name = "mixed"
[sampling]
problems_per_submission = 4
samples_per_problem = 2
temperature = 1.0
max_new_tokens = 8
[training]
submissions_per_step = 1
[[tasks.parts]]
name = "sorts"
curriculum = [{step = 1, weight = 1}, {step = 2, weight = 0}]
[[tasks.parts]]
name = "turns"
curriculum = [{step = 1, weight = 0}, {step = 2, weight = 1}]
"""


@pytest.fixture
def packed(file: Path, tmp_path: Path) -> Path:
    run("import", "set:reverse", "--count", 8, "--out", tmp_path / "turns")
    run("pack", f"sorts={file}", f"turns={tmp_path / 'turns'}", "--out", tmp_path / "mixed")
    return tmp_path / "mixed"


def test_packed_set_shows_its_parts_and_some_of_each(packed: Path) -> None:
    found = answer("show", packed, "--rows", 2)
    assert [(p["name"], p["problems"]) for p in found["parts"]] == [("sorts", 30), ("turns", 8)]
    assert len({problem["task_type"] + problem["source"] for problem in found["first"]}) == 2
    assert "turns: 8 problems of reverse 1" in run("show", packed).stdout


def test_sample_of_a_mixture_goes_by_weights_and_step(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE_OF_PARTS)
    asked = ("sample", packed, "--seed", "0x" + "ab" * 32, "--recipe", tmp_path / "r.toml")
    assert {row["part"] for row in answer(*asked)} == {"sorts"}
    later = answer(*asked, "--step", 2)
    assert {row["part"] for row in later} == {"turns"}
    assert all(30 <= row["index"] < 38 for row in later)
    assert "leave out --count" in str(run(*asked, "--count", 2).exception.hint)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (["sorts"], "'sorts' is not PART=FILE"),
        (["a={file}", "a={other}"], "part 'a' comes 2 times"),
        (["a={file}", "b={file}"], "of part 'b' is in a part before it"),
        (["a={packed}"], "has parts itself"),
        (["A={file}"], "'A' cannot be a part's name"),
    ],
)
def test_pack_refuses_what_makes_no_mixture(
    file: Path, packed: Path, tmp_path: Path, parts: list[str], reason: str
) -> None:
    places = {"file": file, "other": tmp_path / "turns", "packed": packed}
    named = [part.format(**places) for part in parts]
    done = run("pack", *named, "--out", tmp_path / "out")
    assert reason in str(done.exception)
    assert not (tmp_path / "out").exists()
