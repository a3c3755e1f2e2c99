"""Around the flow: keystores, errors of tasks, the compute thread, plans of new runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from trainer_fakes import make_recipe
from worlds.client_world import CALIBRATION

from muster.lifecycle import free_port
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, EncodingError, TaskError
from muster.protocol.ids import Address
from muster.protocol.mixture import PartRecipe, TasksRecipe
from muster.protocol.recipe import Recipe
from muster.tasks import Problem, TaskSet, identities
from muster.tasks.task_set import pack_sets
from muster.tasks.toys import make_reverse, make_sort
from muster.trainer.cli import trainer
from muster.trainer.config import load_recipe
from muster.trainer.create import RunPlan, check_documents

ACCOUNT = Address("0x" + "11" * 20)
SAMPLING = make_recipe().sampling
MEASURED = CALIBRATION.model_copy(
    update={
        "proof": make_recipe().proof,
        "submission_samples": SAMPLING.submission_samples,
        "max_new_tokens": SAMPLING.max_new_tokens,
    }
)
"""A calibration of the recipe's own proofs and sizes."""


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """A run whose documents are in order."""
    (tmp_path / "tasks.jsonl").write_bytes(make_sort(5, 0).to_bytes())
    (tmp_path / "calibration.json").write_bytes(MEASURED.to_bytes())
    return RunPlan(
        model=tmp_path / "model",
        recipe=make_recipe(),
        task_set=tmp_path / "tasks.jsonl",
        calibration=tmp_path / "calibration.json",
        trainer=ACCOUNT,
        orchestrator=ACCOUNT,
        validators=[ACCOUNT],
        quorum=1,
        price_wei=1,
        fraud_ppm=1,
        exact_fraud_ppm=2,
        fund_wei=0,
        store=tmp_path / "store",
        documents=tmp_path / "documents",
    )


def test_documents_are_written_under_their_hashes(plan: RunPlan) -> None:
    documents = check_documents(plan)
    documents.write(plan.documents)
    hashes = documents.hashes()
    tasks = plan.task_set.read_bytes()
    for name, pinned, data in (
        ("recipe", _pinned(plan.recipe).hash(), _pinned(plan.recipe).to_bytes()),
        ("task_set", TaskSet.from_bytes(tasks).hash(), tasks),
        ("calibration", keccak(plan.calibration.read_bytes()), plan.calibration.read_bytes()),
    ):
        assert hashes[name] == pinned
        assert (plan.documents / pinned.hex()).read_bytes() == data


def _pinned(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"verifiers": identities(["exact_match"])})


def test_task_set_smaller_than_a_submission_is_refused(plan: RunPlan) -> None:
    plan.task_set.write_bytes(make_sort(1, 0).to_bytes())
    with pytest.raises(TaskError, match="has 1 problems, a submission needs 2"):
        check_documents(plan)
    assert not plan.documents.exists()


def test_mixture_is_pinned_with_its_weights_and_refused_without(plan: RunPlan) -> None:
    sets = [("sorts", make_sort(5, 0)), ("turns", make_reverse(5, 0))]
    packed = pack_sets(sets, plan.task_set, "mixed", "1")
    with pytest.raises(TaskError, match="the recipe has no weight for part 'sorts' of 'mixed'"):
        check_documents(plan)
    parts = (PartRecipe(name="turns", weight=2), PartRecipe(name="sorts"))
    recipe = plan.recipe.model_copy(update={"tasks": TasksRecipe(parts=parts)})
    documents = check_documents(replace(plan, recipe=recipe))
    documents.write(plan.documents)
    pinned = Recipe.from_bytes((plan.documents / documents.recipe.hash().hex()).read_bytes())
    assert pinned.tasks.weights_at(1) == (2, 1)
    assert TaskSet.open(plan.documents / packed.hash().hex()).parts == packed.parts


def test_task_set_that_nobody_can_grade_is_refused(plan: RunPlan) -> None:
    problems = [Problem(problem_id=str(i), task_type="other", prompt="?") for i in range(2)]
    plan.task_set.write_bytes(TaskSet.of("x", "1", problems).to_bytes())
    with pytest.raises(TaskError, match="no verifier for task type 'other'"):
        check_documents(plan)


def test_calibration_of_another_temperature_is_refused(plan: RunPlan) -> None:
    plan.calibration.write_bytes(MEASURED.model_copy(update={"temperature": 0.6}).to_bytes())
    with pytest.raises(ConfigError, match="at another temperature"):
        check_documents(plan)


@pytest.mark.parametrize(
    ("smaller", "said"),
    [
        ({"max_new_tokens": 5}, "holds for up to 5 tokens a completion, the recipe has 6"),
        ({"submission_samples": 7}, "holds for up to 7 samples a submission, the recipe has 8"),
        ({"schema_version": 5}, "does not say how large the submissions are"),
    ],
)
def test_calibration_of_smaller_or_unknown_submissions_is_refused(
    plan: RunPlan, smaller: dict[str, int], said: str
) -> None:
    plan.calibration.write_bytes(MEASURED.model_copy(update=smaller).to_bytes())
    with pytest.raises(ConfigError, match=said):
        check_documents(plan)


def test_file_that_is_no_calibration_is_named_with_the_option(plan: RunPlan) -> None:
    plan = replace(plan, calibration=plan.task_set)
    with pytest.raises(EncodingError, match=r"/tasks\.jsonl is no calibration: ") as caught:
        check_documents(plan)
    assert caught.value.hint == "give the file that `muster calibrate` wrote, with --calibration"


def test_malformed_calibration_is_refused(plan: RunPlan) -> None:
    plan.calibration.write_bytes(b"{}")
    with pytest.raises(EncodingError):
        check_documents(plan)


def test_missing_document_is_named(plan: RunPlan) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        check_documents(replace(plan, task_set=plan.task_set.with_name("none")))


TOML = """
name = "small"
[sampling]
problems_per_submission = 2
samples_per_problem = 4
temperature = 1.0
max_new_tokens = 6
target_lengths = [2, 4]
[training]
submissions_per_step = 2
[filters]
refill_submissions = 3
"""


def _dry_run(folder: Path, *words: str) -> Result:
    flags = ["--run", "3", "--keystore", str(folder / "none"), "--orchestrator", "http://x:1"]
    return CliRunner().invoke(trainer, ["run", *flags, *words], env={})


def test_dry_run_prints_the_hash_that_creating_the_run_pins(plan: RunPlan, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(TOML)
    documents = check_documents(replace(plan, recipe=load_recipe(path)))
    documents.write(plan.documents)
    pinned = documents.hashes()["recipe"]
    files = ["--recipe", str(path), "--task-set", str(plan.task_set)]
    result = _dry_run(tmp_path, "--dry-run", "--port", "8899", *files)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["recipe_hash"] == hex0x(pinned)
    # The printed document is the pinned one, field by field.
    document = json.loads((plan.documents / pinned.hex()).read_bytes())
    assert found["recipe"] == document
    assert (found["settings"]["port"], found["settings"]["run"]) == (8899, 3)


def test_dry_run_without_a_recipe_resolves_the_settings_alone(tmp_path: Path) -> None:
    found = json.loads(_dry_run(tmp_path, "--dry-run").stdout)
    assert found.keys() == {"settings"}
    assert found["settings"]["keep_checkpoints"] == 2
    assert found["settings"]["compute_dtype"] == "float32"


def test_a_flag_sets_the_number_format_of_the_passes(tmp_path: Path) -> None:
    file = tmp_path / "trainer.toml"
    file.write_text('compute_dtype = "bfloat16"')
    for words in (["--compute-dtype", "bfloat16"], ["--config", str(file)]):
        found = json.loads(_dry_run(tmp_path, "--dry-run", *words).stdout)
        assert found["settings"]["compute_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "--recipe", "demo"], "pinned together with the verifiers"),
        (["--recipe", "demo"], "need --dry-run"),
        (["--dry-run", "--recipe", "none.toml", "--task-set", "none"], "no file, and no preset"),
        (["--dry-run", "--port", "70000"], "setting 'port'"),
    ],
)
def test_dry_run_that_cannot_be_resolved_is_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    result = _dry_run(tmp_path, *words)
    assert result.exit_code != 0
    assert message in f"{result.exception} {result.output}"


@pytest.mark.parametrize(
    ("rank", "code", "said"),
    [("1", 3, "waiting for the ranks to meet failed"), ("0", 1, "no keystore at")],
)
def test_only_the_leading_rank_opens_the_keystore(
    tmp_path: Path, rank: str, code: int, said: str
) -> None:
    """The other rank never comes."""
    of_torchrun = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    flags = f"--run 3 --keystore {tmp_path}/none --orchestrator http://x:1 --rank-timeout-s 0.5"
    found = subprocess.run(
        [sys.executable, "-m", "muster.app", "trainer", "run", *flags.split()],
        env={
            **os.environ,
            **of_torchrun,
            "MASTER_PORT": str(free_port()),
            "MUSTER_PASSWORD": "test",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == code, found.stderr
    assert said in found.stderr
