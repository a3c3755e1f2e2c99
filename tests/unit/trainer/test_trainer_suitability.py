"""A run's parts suit one another, or the creation says which does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.protocol.errors import ConfigError
from muster.protocol.recipe import Recipe
from muster.trainer.config import load_recipe
from muster.trainer.create import largest_file, require_files_fit

DEMO = load_recipe(Path(__file__).parents[3] / "configs" / "demo.toml")


def sampled(**changes: int) -> Recipe:
    return DEMO.model_copy(update={"sampling": DEMO.sampling.model_copy(update=changes)})


def test_largest_file_has_every_proof_and_token() -> None:
    # 2 x 2 samples of 40 tokens: chunks of 32 and 8 rows, 128 points of 2 bytes and a modulus.
    recipe = sampled(problems_per_submission=2, samples_per_problem=2, max_new_tokens=40)
    assert largest_file(recipe, 64) == 4 * (2 * (2 + 2 * 128) + 40 * 4)


def test_small_chunks_have_small_proofs() -> None:
    recipe = sampled(problems_per_submission=1, samples_per_problem=2, max_new_tokens=1)
    assert largest_file(recipe, 16) == 2 * (2 + 2 * 16 + 4)


def test_files_fit_up_to_the_limit_and_no_further() -> None:
    # A chunk of 32 tokens takes 258 + 128 bytes: 64 MiB are 173,856.1 of them.
    shape = {"problems_per_submission": 1, "samples_per_problem": 2}
    require_files_fit(sampled(**shape, max_new_tokens=32 * 86_928), 64)
    with pytest.raises(ConfigError, match=r"can take 64.0 MiB with its proofs") as caught:
        require_files_fit(sampled(**shape, max_new_tokens=32 * 86_929), 64)
    assert "sampling.max_new_tokens" in (caught.value.hint or "")


def test_samples_must_fit_an_outcome_record() -> None:
    require_files_fit(sampled(problems_per_submission=4095, samples_per_problem=16), 64)
    with pytest.raises(ConfigError, match="65536 samples does not fit"):
        require_files_fit(sampled(problems_per_submission=4096, samples_per_problem=16), 64)
