"""`muster trainer bench`: a step of synthetic rollouts, and the number of workers it needs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from trainer_fakes import make_recipe

from muster.trainer.cli import trainer_bench
from muster.trainer.learn.memory_plan import MemoryChoices, MemoryShort, plan_memory
from muster.trainer.measure.bench import BenchFigures, Load, made_up, measure_step
from muster.trainer.measure.figures import PHASES


def _measured(model: Path, **changes: object) -> BenchFigures:
    return measure_step(
        model,
        make_recipe(**changes),
        MemoryChoices(memory_gb=1000.0),
        Load(prompt_tokens=4, completion_tokens=3, repeats=1),
        worker_tokens_per_s=7.0,
    )


def test_workers_generate_as_much_as_a_step_trains_on(model_folder: Path) -> None:
    found = replace(_measured(model_folder), step_s=2.0, step_tokens=100, worker_tokens_per_s=7.0)
    assert found.workers == 8  # 50 tokens/s, 7 each
    assert f"7 tokens/s: {found.workers} of them" in found.text()


def test_measured_memory_stands_beside_the_plan_of_the_same(model_folder: Path) -> None:
    found = _measured(model_folder)
    assert 0 < found.planned_bytes < found.plan.peak
    assert found.figures()["planned_memory_gb"] == found.planned_bytes / 1e9
    assert found.step.memory_bytes > 1e8


def test_a_stale_step_takes_a_pass_more_than_a_fresh_one(model_folder: Path) -> None:
    stale, fresh = _measured(model_folder), _measured(model_folder, max_async_level=0)
    assert stale.step.flops == pytest.approx(4 / 3 * fresh.step.flops)


def test_made_up_lengths_have_the_mean_that_was_asked_for() -> None:
    recipe = make_recipe()
    sampling = recipe.sampling.model_copy(update={"max_new_tokens": 4000})
    groups = made_up(recipe.model_copy(update={"sampling": sampling}), 50, Load(400, 3, 300))
    lengths = [len(row.completion_tokens) for rows in groups for row in rows]
    assert sum(lengths) / len(lengths) == pytest.approx(300, rel=0.05)
    assert {len(row.prompt_tokens) for rows in groups for row in rows} == {3}
    assert all({row.task_reward for row in rows} == {0.0, 1.0} for rows in groups)


def test_command_reckons_the_recipes_step_from_a_part(tmp_path: Path, model_folder: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "name = 'small'\n[sampling]\nproblems_per_submission = 2\nsamples_per_problem = 4\n"
        "temperature = 1.0\nmax_new_tokens = 6\n[training]\nsubmissions_per_step = 8\n"
        "optimizer_steps = 1\n"
    )
    asked = ["--model", str(model_folder), "--recipe", str(recipe), "--groups", "4"]
    result = CliRunner().invoke(
        trainer_bench, [*asked, "--repeats", "1", "--memory-gb", "1000", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["recipe_step_tokens"] == 4 * found["tokens"]
    assert found["samples"] == 16
    assert found.keys() >= {*PHASES, "mfu", "peak_tflops", "workers", "worker_tokens_per_s"}
    assert found["wall_s"] < found["recipe_step_s"] <= 4 * found["wall_s"]


def test_what_does_not_fit_is_refused_before_it_is_measured(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.trainer.learn.memory_plan._process_bytes", lambda _: 450e6)
    choices = MemoryChoices(memory_gb=1000.0, micro_batch_tokens=2048, recompute="none")
    takes = plan_memory(model_folder, make_recipe(), choices).peak
    # One byte is missing, so that the hint's first proposal is enough.
    less = replace(choices, memory_gb=(takes - 1) / 1e9)
    with pytest.raises(MemoryShort, match="training needs"):
        measure_step(model_folder, make_recipe(), less, Load())
