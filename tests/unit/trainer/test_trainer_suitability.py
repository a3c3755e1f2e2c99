"""A run's documents fit together, or its creation names the one that does not fit."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from muster.inference import Completion
from muster.protocol.errors import ConfigError
from muster.protocol.recipe import Recipe
from muster.tasks.toys import make_sort
from muster.trainer import create
from muster.trainer.config import load_recipe

DEMO = load_recipe(Path(__file__).parents[3] / "configs" / "demo.toml")


def sampled(**changes: int) -> Recipe:
    return DEMO.model_copy(update={"sampling": DEMO.sampling.model_copy(update=changes)})


def test_largest_file_has_every_proof_and_token() -> None:
    # 2 x 2 samples of 40 tokens: chunks of 32 and 8 rows, 128 points of 2 bytes and a modulus.
    recipe = sampled(problems_per_submission=2, samples_per_problem=2, max_new_tokens=40)
    assert create.largest_file(recipe, 64) == 4 * (2 * (2 + 2 * 128) + 40 * 4)


def test_small_chunks_have_small_proofs() -> None:
    recipe = sampled(problems_per_submission=1, samples_per_problem=2, max_new_tokens=1)
    assert create.largest_file(recipe, 16) == 2 * (2 + 2 * 16 + 4)


def test_files_fit_up_to_the_limit_and_no_further() -> None:
    # A chunk of 32 tokens takes 258 + 128 bytes: 64 MiB are 173,856.1 of them.
    shape = {"problems_per_submission": 1, "samples_per_problem": 2}
    create.require_files_fit(sampled(**shape, max_new_tokens=32 * 86_928), 64)
    with pytest.raises(ConfigError, match=r"can take 64.0 MiB with its proofs") as caught:
        create.require_files_fit(sampled(**shape, max_new_tokens=32 * 86_929), 64)
    assert "sampling.max_new_tokens" in (caught.value.hint or "")


def test_samples_must_fit_an_outcome_record() -> None:
    create.require_files_fit(sampled(problems_per_submission=4095, samples_per_problem=16), 64)
    with pytest.raises(ConfigError, match="65536 samples does not fit"):
        create.require_files_fit(sampled(problems_per_submission=4096, samples_per_problem=16), 64)


@pytest.mark.parametrize("rows", [{"problems_per_submission": 9}, {"problems_per_submission": 1}])
def test_the_change_that_is_named_makes_files_fit(rows: dict[str, int]) -> None:
    recipe = sampled(samples_per_problem=16, max_new_tokens=32 * 20_000, **rows)
    with pytest.raises(ConfigError, match="with its proofs") as caught:
        create.require_files_fit(recipe, 5120)
    named = dict(re.findall(r"sampling\.(\w+) = (\d+)", caught.value.hint or ""))
    create.require_files_fit(sampled(samples_per_problem=16, **{**SIZE, **ints(named)}), 5120)


SIZE = {"max_new_tokens": 32 * 20_000}


def ints(named: dict[str, str]) -> dict[str, int]:
    return {name: int(value) for name, value in named.items()}


def test_a_submission_must_be_checked_before_outcomes_are_due() -> None:
    # 4 x 16 samples of 900 + 100 tokens at 10 ms each: 640 s.
    shape = {"samples_per_problem": 16, "max_new_tokens": 900}
    check = create.CheckTime(per_token_s=0.01, prompt_tokens=100.0, device="cpu")
    recipe = sampled(problems_per_submission=4, **shape)
    create.require_checkable(recipe, check, 640)
    with pytest.raises(ConfigError, match="about 640 s to check on cpu") as caught:
        create.require_checkable(recipe, check, 600)
    assert "problems_per_submission = 3" in (caught.value.hint or "")
    create.require_checkable(sampled(problems_per_submission=3, **shape), check, 600)


class Engine:
    """An engine whose examination takes two hundredths of a second."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def generate(self, requests: Any, **_: Any) -> list[Completion]:
        return [Completion((1,) * request.max_new_tokens, []) for request in requests]

    def examine(self, samples: Any, **_: Any) -> None:
        self.seen = samples
        time.sleep(0.02)


def test_the_time_of_a_check_is_measured_on_completions_of_the_model() -> None:
    engine, tasks = Engine(), make_sort(8, seed=0)
    found = create.measure_check(engine, tasks, sampled(max_new_tokens=10), "cpu")  # type: ignore[arg-type]
    lengths = [len(tasks[n].prompt) for n in range(4)]
    assert [len(each.prompt_tokens) for each in engine.seen] == lengths
    assert found.prompt_tokens == sum(lengths) / 4
    assert found.per_token_s >= 0.02 / (sum(lengths) + 40)


@pytest.mark.parametrize("change", [None, "a number", "the format"])
def test_tied_head_that_is_stored_twice_must_be_the_embeddings(
    model_folder: Path, tmp_path: Path, change: str | None
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    if change == "a number":
        head[0, 0] += 1
    weights["lm_head.weight"] = head.bfloat16() if change == "the format" else head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if change is None:
        assert "model.safetensors" in create.model_files(folder)
    else:
        with pytest.raises(ConfigError, match=r"lm_head.weight .* model.embed_tokens.weight"):
            create.model_files(folder)
