"""A run's requirements for software: versions, calibrated engines, pinned libraries."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from pydantic import ValidationError
from worlds.client_world import CALIBRATION, RECIPE, RULES, TASK_SET

from muster.client import preflight
from muster.client.connections import with_context
from muster.client.settings import WorkerSettings
from muster.client.tickets import longest_sample
from muster.protocol.errors import ConfigError
from muster.protocol.recipe import Recipe


def pinning(version: str) -> Recipe:
    return Recipe.model_validate(RECIPE.model_dump() | {"min_software": version})


def settings(**changes: object) -> WorkerSettings:
    given = {"run": 1, "orchestrator": "http://o", "state_dir": "s", "worker": "0x" + "ab" * 20}
    return WorkerSettings(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pinned", "version"),
    [
        ("", "0.0.1"),
        ("0.2", "0.2.0"),
        ("0.2.0", "0.2"),
        ("0.2.0", "0.10.0"),
        ("0.2.0", "1"),
        ("0.2.0", "0.2.1rc1"),
        ("0.2.0", "0.2.0+local.7"),
    ],
)
def test_software_as_new_as_the_pinned_is_taken(pinned: str, version: str) -> None:
    preflight.require_software(pinning(pinned), version)


@pytest.mark.parametrize(
    ("pinned", "version"), [("0.2.0", "0.1.9"), ("0.10", "0.9.9"), ("1", "0.99"), ("0.0.2", "0")]
)
def test_older_software_is_refused_with_the_way_to_upgrade(pinned: str, version: str) -> None:
    with pytest.raises(ConfigError, match=f"asks for {pinned} or newer") as caught:
        preflight.require_software(pinning(pinned), version)
    assert "install a newer release" in (caught.value.hint or "")


def test_this_tree_takes_part_where_its_release_is_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    preflight.require_software(pinning("0.2.0"), project["version"])


@pytest.mark.parametrize("pinned", ["1.x", "v1", "1..2", "1.2.3.4.5", "1" * 9, "-1"])
def test_a_recipe_cannot_pin_what_is_no_version(pinned: str) -> None:
    with pytest.raises(ValidationError):
        pinning(pinned)


def test_an_engine_that_nobody_calibrated_is_refused_with_those_that_are() -> None:
    preflight.require_covered(CALIBRATION, "transformers:float32")
    with pytest.raises(ConfigError, match="calibrated for transformers:float32, not for") as caught:
        preflight.require_covered(CALIBRATION, preflight.engine_name(settings(dtype="bfloat16")))
    assert "--dtype" in (caught.value.hint or "")


def test_a_model_over_several_gpus_is_a_way_that_is_calibrated_by_itself() -> None:
    spread = preflight.engine_name(settings(engine="vllm", device="cuda", tensor_parallel=2))
    model = CALIBRATION.model.model_copy(update={"engine": "transformers:float32, vllm:float32"})
    calibration = CALIBRATION.model_copy(update={"model": model})
    preflight.require_covered(calibration, "vllm:float32")
    with pytest.raises(ConfigError, match="not for vllm:float32:tp2") as caught:
        preflight.require_covered(calibration, spread)
    assert "--tensor-parallel" in (caught.value.hint or "")
    model = model.model_copy(update={"engine": "transformers:float32, vllm:float32:tp2"})
    preflight.require_covered(CALIBRATION.model_copy(update={"model": model}), spread)


@pytest.mark.parametrize("other", [{}, {"engine": "vllm"}, {"device": "cuda"}])
def test_only_vllm_on_gpus_spreads_a_model(other: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="--tensor-parallel needs --engine vllm"):
        settings(tensor_parallel=2, **other)


def test_an_engine_makes_room_for_the_longest_sample_of_the_run_unless_told_otherwise() -> None:
    longest = longest_sample(RECIPE, TASK_SET)
    bytes_of = [len(problem.prompt.encode()) for problem in TASK_SET]
    assert longest == max(bytes_of) + 256 + RECIPE.sampling.max_new_tokens
    assert with_context(settings(), RULES).context == longest
    assert with_context(settings(context=90), RULES).context == 90


def test_an_engine_of_another_version_than_the_pinned_is_refused() -> None:
    torch = metadata.version("torch").split("+")[0]
    preflight.require_pinned_engine([f"torch=={torch}; extra == 'model'"])
    with pytest.raises(ConfigError, match=r"torch .* is installed, limits .* with 1\.0"):
        preflight.require_pinned_engine(["torch==1.0; extra == 'model'"])


@pytest.mark.parametrize(
    "requirement",
    ["no-such-package==1.0; extra == 'model'", "torch>=1; extra == 'model'", "torch==1.0", ""],
)
def test_what_is_not_installed_or_not_pinned_is_left_alone(requirement: str) -> None:
    preflight.require_pinned_engine([requirement])


def test_this_very_installation_is_fit() -> None:
    preflight.require_fit(RECIPE, CALIBRATION, settings())
    assert preflight.installed_version()
