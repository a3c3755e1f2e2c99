"""Sweeps that `make test-all` runs: honest submissions by the ten thousand, and larger models."""

import random
from pathlib import Path

import pytest
from scripts import load_script

from muster.inference.calibrate import calibrate_model
from muster.inference.calibration_plan import MeasuringPlan, Way
from muster.inference.engine import Request
from muster.inference.measuring import Errors, OwnParty
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.intervals import rate_bound
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe

base_models = load_script("benchmarks/proofs/base_models.py")
SUBMISSION = 8
SUBMISSIONS = 30_000
"""None rejected bounds the rate below 1e-4 with 95 % confidence."""
AT_ONCE = 4_096


def recipe(tokens: int) -> Recipe:
    return Recipe(
        name="sweep",
        sampling=SamplingRecipe(
            problems_per_submission=2,
            samples_per_problem=SUBMISSION // 2,
            temperature=1.0,
            max_new_tokens=tokens,
        ),
        training=TrainingRecipe(submissions_per_step=1),
    )


def drawn(count: int, seed: int = 0) -> list[str]:
    source = random.Random(seed)
    return ["".join(source.choices("0123456789", k=4)) + "=" for _ in range(count)]


@pytest.mark.slow
def test_honest_submissions_are_rejected_less_than_once_in_ten_thousand(
    policy_folder: Path,
) -> None:
    """Workers and validators batch differently, so their roundings differ."""
    rules = recipe(5)
    calibration = calibrate_model(
        policy_folder, MeasuringPlan(rules, drawn(64), profile="quick")
    ).calibration
    engine = TransformersEngine()
    engine.load_policy(policy_folder, PolicyVersion(0))
    bench, source = OwnParty(engine, rules), random.Random(1)
    prompts = [engine.encode(prompt) for prompt in drawn(5_000, seed=1)]
    rejected = 0
    for start in range(0, SUBMISSION * SUBMISSIONS, AT_ONCE):
        count = min(AT_ONCE, SUBMISSION * SUBMISSIONS - start)
        requests = [
            Request(source.choice(prompts), source.getrandbits(64), 1.0, 5) for _ in range(count)
        ]
        work = bench.generate(requests, Way("worker", max_rows=1_024))
        errors = Errors.of(bench.examine(work, Way("validator", max_rows=777)))
        failed = [
            not (all(map(calibration.chunk_passes, chunks)) and calibration.sampler_passes(margins))
            for chunks, margins in zip(errors.chunks, errors.margins, strict=True)
        ]
        rejected += sum(any(failed[i : i + SUBMISSION]) for i in range(0, count, SUBMISSION))
    assert rejected == 0
    assert rate_bound(SUBMISSIONS) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers:float32", "transformers:bfloat16"])
@pytest.mark.parametrize(("size", "steps"), [("4x256", 80), ("8x512", 40)])
def test_no_forgery_passes_on_larger_models(
    tmp_path_factory: pytest.TempPathFactory, size: str, steps: int, engine: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"{size}-{steps}"
    if not folder.exists():
        base_models.build(base_models.shortened(size, steps), folder)
    source = random.Random(0)
    prompts = [base_models.prompt(source) for _ in range(64)]
    run = calibrate_model(folder, MeasuringPlan(recipe(40), prompts, (engine,), profile="quick"))
    nothing = [row for row in run.table if row.kind == "nothing"]
    honest = [row for row in run.table if row.kind == "honest"]
    assert run.refusal is None
    assert all(row.accepted == 0 and row.trials >= 300 for row in nothing)
    assert all(row.accepted == row.trials for row in honest)
