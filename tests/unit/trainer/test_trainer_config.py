"""Recipes as TOML, the presets' figures, and settings."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from muster.protocol.errors import ConfigError
from muster.protocol.recipe import Recipe
from muster.trainer.cli import trainer
from muster.trainer.config import load_recipe

CONFIGS = Path(__file__).parents[3] / "configs"
MINIMAL = """
name = "small"
[sampling]
problems_per_submission = 2
samples_per_problem = 4
temperature = 1
max_new_tokens = 8
[training]
submissions_per_step = 2
"""


def _load(folder: Path, text: str, **options: int) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text)
    return load_recipe(path, **options)


def test_minimal_recipe_is_intellect_2_otherwise(tmp_path: Path) -> None:
    training = _load(tmp_path, MINIMAL).training
    assert (training.learning_rate, training.clip_delta, training.max_grad_norm) == (3e-7, 4.0, 0.1)
    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.99, 0.01)


def test_steps_can_be_given_apart(tmp_path: Path) -> None:
    assert _load(tmp_path, MINIMAL, steps=7).training.steps == 7
    assert _load(tmp_path, MINIMAL).training.steps == 0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("temperature = 1", "temperature = 0", "sampling.temperature"),
        ("temperature = 1", "temprature = 1", "sampling.temperature: Field required"),
        ("[training]", "[trianing]", "training"),
        ("submissions_per_step = 2", "submissions_per_step = 2.5", "submissions_per_step"),
        ("submissions_per_step = 2", "submissions_per_step = 1979-05-27", "not JSON serializable"),
        ("submissions_per_step = 2", "submissions_per_step = 2\nclip_delta = 1.1", "clip_delta"),
        ("[sampling]", "[sampling", "not valid TOML"),
    ],
)
def test_mutated_recipe_is_refused_by_field(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        _load(tmp_path, MINIMAL.replace(old, new))


def test_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        load_recipe(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ["demo", "intellect2-short", "intellect2-long"])
def test_preset_survives_its_canonical_form(name: str) -> None:
    recipe = load_recipe(CONFIGS / f"{name}.toml")
    assert Recipe.from_bytes(recipe.to_bytes()) == recipe


@pytest.mark.parametrize(
    ("name", "targets", "steps"),
    [("short", (1000, 2000, 3000, 4000), 200), ("long", (2000, 4000, 6000, 8000, 10000), 350)],
)
def test_intellect_2_presets_have_the_report_s_figures(
    name: str, targets: tuple[int, ...], steps: int
) -> None:
    recipe = load_recipe(CONFIGS / f"intellect2-{name}.toml")
    sampling, training = recipe.sampling, recipe.training
    assert sampling.target_lengths == targets
    samples = sampling.problems_per_submission * sampling.samples_per_problem
    assert samples * training.submissions_per_step == 4096
    assert (training.steps, training.optimizer_steps, training.max_async_level) == (steps, 8, 2)
    assert (training.clip_epsilon, training.clip_delta) == (0.2, 4.0)
    assert (training.kl_coefficient, training.entropy_coefficient) == (0.001, 1e-4)
    assert (training.learning_rate, training.warmup_steps) == (3e-7, 25)
    assert (training.max_grad_norm, training.length_alpha) == (0.1, 0.0003)


@pytest.mark.parametrize("name", ["short", "long"])
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    lines = (CONFIGS / f"intellect2-{name}.toml").read_text().splitlines()
    figures = [line for line in lines if re.match(r"^[a-z_]+ = ", line) and "name =" not in line]
    assert len(figures) > 25
    unsourced = [f for f in figures if not re.search(r"# (report|code|ours|TOPLOC)", f)]
    assert unsourced == []


@pytest.mark.parametrize("name", ["short", "long"])
def test_presets_go_on_until_groups_have_advantages(name: str) -> None:
    recipe = load_recipe(CONFIGS / f"intellect2-{name}.toml")
    training, filters = recipe.training, recipe.filters
    assert (training.loss, training.aggregation, training.advantage) == (
        "two_sided",
        "token",
        "std",
    )
    assert filters.refill_submissions == training.submissions_per_step


def test_demo_step_has_512_samples() -> None:
    recipe = load_recipe(CONFIGS / "demo.toml")
    samples = recipe.sampling.problems_per_submission * recipe.sampling.samples_per_problem
    assert samples * recipe.training.submissions_per_step == 512


def test_commands_import_nothing_heavy() -> None:
    code = (
        "import sys, json, muster.trainer.cli;"
        "print(json.dumps([m for m in ('torch','transformers','web3','pyarrow') "
        "if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--orchestrator", "http://x", "--keystore", "k"], "setting 'run' is missing"),
        (["--run", "0", "--orchestrator", "http://x", "--keystore", "k"], "setting 'run'"),
        (["--run", "1", "--orchestrator", "x", "--keystore", "none"], "there is no keystore"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_loaded(
    arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(trainer, ["run", *arguments], env={"MUSTER_PASSWORD": "x"})
    assert result.exit_code != 0
    assert message in str(result.exception)
