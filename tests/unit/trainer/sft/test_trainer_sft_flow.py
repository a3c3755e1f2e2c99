"""From a data set to a base model: the same bytes after a kill, and the lineage."""

import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from muster.app.cli import muster
from muster.protocol.encoding import canonical_json
from muster.protocol.errors import ConfigError, EngineError, MusterError, StorageError
from muster.protocol.recipe import PromptRecipe
from muster.protocol.sft import SftRecipe
from muster.tasks import Undecided
from muster.tasks.toys import make_sort
from muster.trainer.learn.memory_plan import MemoryChoices
from muster.trainer.learn.parallel import Ranks
from muster.trainer.measure import evaluate
from muster.trainer.sft import lineage
from muster.trainer.sft.flow import FineTuning, fine_tune
from muster.trainer.sft.job import TuningJob, prepare
from muster.trainer.sft.source import open_source

STEPS = 12

RECIPE = SftRecipe.model_validate(
    {
        "name": "test",
        "rows": {"max_tokens": 24, "held_out_share": 0.1},
        "training": {"batch_tokens": 100, "learning_rate": 2e-3, "warmup_steps": 2},
        "sampling": {"max_new_tokens": 6},
    }
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits and their order."""
    folder = tmp_path_factory.mktemp("data") / "rows"
    folder.mkdir()
    rows = [f"{n * 7919 % 10000:04d}" for n in range(130)]
    lines = [json.dumps({"prompt": f"{d}=", "completion": "".join(sorted(d))}) for d in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def job_of(folder: Path, data: Path, model: Path) -> TuningJob:
    return TuningJob(
        data=data,
        model=model,
        recipe=RECIPE,
        out=folder / "student",
        state_dir=folder / "state",
        choices=MemoryChoices(),
        save_every=3,
        eval_every=5,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, data: Path, model_folder: Path) -> TuningJob:
    """A fine-tuning that nobody disturbed."""
    job = job_of(tmp_path_factory.mktemp("made"), data, model_folder)
    assert fine_tune(job) == job.out
    return job


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def entries(job: TuningJob) -> list[dict[str, float]]:
    lines = (job.state_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_model_learns_what_it_is_shown(made: TuningJob) -> None:
    steps = [entry["step"] for entry in entries(made) if "step" in entry]
    assert steps == list(range(1, STEPS + 1))
    held_out = [entry["eval"] for entry in entries(made) if "eval" in entry]
    assert [each["policy_version"] for each in held_out] == [0, 5, 10, STEPS]
    assert held_out[-1]["loss"] < 0.9 * held_out[0]["loss"]


def run_and_kill(job: TuningJob, *, lines: int) -> None:
    """Run a fine-tuning in a process of its own, and end it with SIGKILL at a line of its log."""
    log = job.state_dir / "metrics.jsonl"
    child = os.fork()
    if not child:
        fine_tune(job)
        os._exit(1)
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= lines):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_killed_fine_tuning_goes_on_to_the_same_bytes(
    tmp_path: Path, made: TuningJob, data: Path, model_folder: Path
) -> None:
    job = job_of(tmp_path, data, model_folder)
    for lines in (6, 10):
        run_and_kill(job, lines=lines)
        assert not job.out.exists()
    fine_tune(job)
    assert files(job.out) == files(made.out)
    same = ("step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "eval")
    told = [[{n: e[n] for n in same if n in e} for e in entries(each)] for each in (job, made)]
    assert told[0] == told[1]


def test_the_same_command_again_makes_the_same_model(made: TuningJob) -> None:
    before = files(made.out)
    shutil.rmtree(made.out)
    fine_tune(made)
    assert files(made.out) == before


def test_other_ranks_end_before_the_model_is_copied_and_hashed(
    made: TuningJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(made.out)
    ranks, seen = Ranks(), list[bool]()
    monkeypatch.setattr(ranks, "dismiss", lambda: seen.append(made.out.exists()))
    tuning = FineTuning(prepare(made), None)
    monkeypatch.setattr(tuning, "_ranks", ranks)
    assert tuning.run().is_dir()
    assert seen == [False]


def test_an_adapter_is_merged_into_the_model(
    tmp_path: Path, data: Path, model_folder: Path, made: TuningJob
) -> None:
    adapter = RECIPE.adapter.model_copy(update={"rank": 2})
    recipe = RECIPE.model_copy(update={"adapter": adapter})
    job = replace(job_of(tmp_path, data, model_folder), recipe=recipe)
    fine_tune(job)
    assert files(job.out).keys() == files(made.out).keys()
    assert files(job.out)["model.safetensors"] != files(model_folder)["model.safetensors"]


@pytest.mark.parametrize("is_disturbance", [True, False])
def test_training_goes_on_where_nothing_can_be_graded(
    tmp_path: Path,
    data: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_disturbance: bool,
) -> None:
    undecided = Undecided("no memory", is_disturbance)
    monkeypatch.setattr(evaluate, "verify_all", lambda answers: [undecided] * len(answers))
    make_sort(2, seed=3).write(tmp_path / "held-out.jsonl")
    job = replace(job_of(tmp_path, data, model_folder), eval_set=tmp_path / "held-out.jsonl")
    assert fine_tune(replace(job, eval_every=0)).is_dir()
    found = [entry["eval"] for entry in entries(job) if "eval" in entry]
    assert [each["policy_version"] for each in found] == [0, STEPS]
    assert all(each["loss"] > 0 and each.get("reward") is None for each in found)


def test_fine_tuning_ends_with_its_model_where_the_engine_fails(
    tmp_path: Path, data: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise EngineError("inference failed: out of memory")

    monkeypatch.setattr(evaluate, "play", fails)
    make_sort(2, seed=3).write(tmp_path / "held-out.jsonl")
    job = replace(job_of(tmp_path, data, model_folder), eval_set=tmp_path / "held-out.jsonl")
    assert fine_tune(replace(job, eval_every=0)).is_dir()
    found = [entry["eval"] for entry in entries(job) if "eval" in entry]
    assert all(each["loss"] > 0 and "reward" not in each for each in found)


def test_reward_on_held_out_problems_is_measured(
    tmp_path: Path, data: Path, model_folder: Path
) -> None:
    make_sort(8, seed=3).write(tmp_path / "held-out.jsonl")
    job = replace(job_of(tmp_path, data, model_folder), eval_set=tmp_path / "held-out.jsonl")
    fine_tune(replace(job, eval_every=0))
    found = [entry["eval"] for entry in entries(job) if "eval" in entry]
    assert [(each["policy_version"], each["problems"]) for each in found] == [(0, 8), (STEPS, 8)]
    assert all(0 <= each["reward_low"] <= each["reward"] <= 1 for each in found)


# Refusals


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, made: TuningJob) -> None:
    job = replace(made, out=tmp_path / "mine", state_dir=tmp_path / "state")
    job.out.mkdir()
    (job.out / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="mine is not empty"):
        fine_tune(job)
    assert not job.state_dir.exists()


def test_another_recipe_neither_replaces_the_model_nor_goes_on_from_its_state(
    tmp_path: Path, made: TuningJob
) -> None:
    other = replace(made, recipe=RECIPE.model_copy(update={"name": "other"}))
    with pytest.raises(ConfigError, match="holds a model of another recipe, data set or base"):
        fine_tune(other)
    with pytest.raises(ConfigError, match="belongs to a fine-tuning with recipe_hash"):
        fine_tune(replace(other, out=tmp_path / "other"))


def test_a_base_whose_weights_are_no_numbers_is_refused(tmp_path: Path, made: TuningJob) -> None:
    base = Path(shutil.copytree(made.model, tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    job = replace(made, model=base, out=tmp_path / "out", state_dir=tmp_path / "state")
    with pytest.raises(ConfigError, match="the loss on held-out rows is nan"):
        fine_tune(job)
    assert not job.out.exists()


def test_rows_longer_than_the_model_reads_are_refused(tmp_path: Path, made: TuningJob) -> None:
    rows = RECIPE.rows.model_copy(update={"max_tokens": 129})
    job = replace(
        made,
        recipe=RECIPE.model_copy(update={"rows": rows}),
        out=tmp_path / "out",
        state_dir=tmp_path / "state",
    )
    with pytest.raises(ConfigError, match="129 tokens, the model reads 128"):
        fine_tune(job)


# Lineage


def verdicts(folder: Path, data: Path | None, base: Path | None) -> dict[str, str]:
    return {c.name: c.verdict for c in lineage.check_lineage(folder, data=data, base=base)}


def test_a_lineage_is_proven_as_far_as_its_parts_are_at_hand(
    made: TuningJob, data: Path, model_folder: Path
) -> None:
    ok = dict.fromkeys(("model", "recipe", "data", "base"), "ok")
    assert verdicts(made.out, data, model_folder) == ok
    assert verdicts(made.out, None, None) == {**ok, "data": "open", "base": "open"}


@pytest.fixture
def copy(tmp_path: Path, made: TuningJob) -> Path:
    return Path(shutil.copytree(made.out, tmp_path / "copy"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / lineage.LINEAGE
    path.write_bytes(canonical_json({**json.loads(path.read_bytes()), **changes}))


def test_a_model_that_was_changed_is_found(copy: Path, data: Path, model_folder: Path) -> None:
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    found = verdicts(copy, data, model_folder)
    assert found == {"model": "wrong", "recipe": "ok", "data": "ok", "base": "ok"}
    assert lineage.describe_base(copy).startswith("descends: fine-tuned in 12 steps")


def test_a_run_that_asks_otherwise_than_the_model_was_shown_is_told(made: TuningJob) -> None:
    chat = PromptRecipe(form="chat")
    assert "OTHER PROMPTS" not in lineage.describe_base(made.out, PromptRecipe(answer_after="="))
    assert lineage.describe_base(made.out, chat).endswith(
        "; it was shown OTHER PROMPTS than the recipe's [prompt] makes"
    )


def test_a_recipe_that_was_changed_is_found(copy: Path, data: Path, model_folder: Path) -> None:
    recipe = json.loads((copy / lineage.LINEAGE).read_bytes())["recipe"]
    edit(copy, recipe={**recipe, "name": "better"})
    assert verdicts(copy, data, model_folder)["recipe"] == "wrong"
    edit(copy, recipe={"name": "better"})
    assert verdicts(copy, data, model_folder)["recipe"] == "wrong"


def test_other_data_and_another_base_are_found(
    copy: Path, data: Path, model_folder: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(data, tmp_path / "other"))
    with (other / "train.jsonl").open("a") as file:
        file.write("\n{}")
    assert verdicts(copy, other, model_folder)["data"] == "wrong"
    assert verdicts(copy, data, copy)["base"] == "wrong"
    edit(copy, data_origin={"run_id": 1, "chain_id": 1})
    assert verdicts(copy, data, model_folder)["data"] == "wrong"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "other"}, "unknown lineage format 'other' 1"),
        ({"more": 1}, "malformed lineage"),
        ({"steps_": 1}, "malformed lineage"),
        ({"base": 7}, "a count or a hash is invalid"),
        ({"model": "0x12\x1b[2J"}, "a count or a hash is invalid"),
        ({"rows": {"trained": "\x1b[2J"}}, "a count or a hash is invalid"),
        ({"data_origin": {"run_id": "1", "chain_id": 1}}, "a count or a hash is invalid"),
        ({"rows": []}, "a field has the wrong type"),
    ],
)
def test_a_lineage_of_another_form_is_refused(
    copy: Path, changes: dict[str, object], why: str
) -> None:
    edit(copy, **changes)
    with pytest.raises(ConfigError, match=why):
        lineage.read_lineage(copy)


def test_a_base_model_keeps_its_own_lineage(tmp_path: Path, made: TuningJob, data: Path) -> None:
    job = job_of(tmp_path, data, made.out)
    fine_tune(job)
    found = lineage.read_lineage(job.out)
    assert found is not None
    assert found.base_lineage is not None
    assert lineage.ModelLineage.from_bytes(
        canonical_json(found.base_lineage)
    ) == lineage.read_lineage(made.out)
    assert verdicts(job.out, data, made.out)["base"] == "ok"


def test_a_lineage_that_nobody_could_read_back_is_refused_before_the_first_step(
    tmp_path: Path, made: TuningJob, copy: Path
) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for number in range(30):
        (many / f"{'x' * 240}{number}.jsonl").touch()
    source = open_source(many)
    lineage.require_room(source, lineage.read_lineage(copy))
    with pytest.raises(ConfigError, match="the lineage of 9000 files of rows"):
        lineage.require_room(replace(source, files=source.files * 300), None)
    (copy / lineage.LINEAGE).write_text("{}")
    job = replace(made, model=copy, out=tmp_path / "out", state_dir=tmp_path / "state")
    with pytest.raises(ConfigError, match=r"lineage\.json is damaged"):
        fine_tune(job)
    assert not job.state_dir.exists()


# The commands


def run(*words: object) -> tuple[str, MusterError | None]:
    result = CliRunner().invoke(muster, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, MusterError)
    return result.stdout, result.exception


def test_commands_make_a_model_and_say_what_it_is_of(
    tmp_path: Path, made: TuningJob, data: Path, model_folder: Path
) -> None:
    (tmp_path / "sft.toml").write_text(
        'name = "test"\n[rows]\nmax_tokens = 24\nheld_out_share = 0.1\n'
        "[training]\nbatch_tokens = 100\nlearning_rate = 2e-3\nwarmup_steps = 2\n"
        "[sampling]\nmax_new_tokens = 6\n"
    )
    out = tmp_path / "student"
    words = ("--data", data, "--model", model_folder, "--recipe", tmp_path / "sft.toml")
    said, error = run("trainer", "sft", *words, "--out", out, "--save-every", 100)
    assert (said, error) == (f"{out}\n", None)
    assert files(out) == files(made.out)
    assert (tmp_path / "student-state" / "metrics.jsonl").is_file()
    said, error = run("trainer", "lineage", out, "--data", data)
    assert error is None
    assert said.startswith("fine-tuned in 12 steps on ")
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["ok", "ok", "ok", "open"]
    said, error = run("trainer", "lineage", out, "--model", out)
    assert isinstance(error, StorageError)
    assert "differs from its lineage in: base" in str(error)


def test_a_plan_is_made_of_an_sft_recipe_too(tmp_path: Path, model_folder: Path) -> None:
    recipe = tmp_path / "sft.toml"
    recipe.write_text('name = "t"\n[rows]\nmax_tokens = 24\n[training]\nbatch_tokens = 100\n')
    words = ("--model", model_folder, "--recipe", recipe, "--memory-gb", 8, "--json")
    said, error = run("trainer", "plan", *words)
    assert error is None
    assert json.loads(said)["micro_batch_tokens"] == 16_384
    recipe.write_text('name = "t"\n[rows]\n[training]\nbatch_tokens = 100\n')
    _, error = run("trainer", "plan", *words)
    assert "rows.max_tokens: Field required" in str(error)


def test_a_recipe_of_a_run_is_no_sft_recipe(tmp_path: Path, data: Path, model_folder: Path) -> None:
    recipe = Path(__file__).parents[4] / "configs" / "demo.toml"
    words = ("--data", data, "--model", model_folder, "--recipe", recipe)
    _, error = run("trainer", "sft", *words, "--out", tmp_path / "out")
    assert isinstance(error, ConfigError)
    assert "rows: Field required" in str(error)
