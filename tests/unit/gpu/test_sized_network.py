"""The network for larger policies, here with a small one."""

import asyncio
import json
from pathlib import Path

import pytest
from benchmarks.inference.network import Size, measure, problem, write_chat_model

from muster.inference.engine import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe


def test_random_weights_answer_some_problems_and_end_by_themselves(tmp_path: Path) -> None:
    write_chat_model(tmp_path, "small")
    engine = TransformersEngine("bfloat16")
    engine.load_policy(tmp_path, PolicyVersion(1))
    asked = [Request((1, 2, 3), seed, 1.0, 192) for seed in range(24)]
    made = engine.generate(asked, proof=ProofRecipe())
    answers = [engine.decode(completion.tokens) for completion in made]
    right = answers.count(json.loads(problem(7))["gold_standard_solution"])
    assert 2 <= right <= 16
    assert {len(completion.tokens) == 192 for completion in made} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["adapter", "full"])
def test_all_honest_work_is_accepted_and_trained_on(weights: str) -> None:
    metrics, detail = asyncio.run(measure(Size(weights, "cpu", 64, 2, "small")))
    assert metrics["sized_network_rejected"] == 0
    assert metrics["sized_network_accepted"] >= 4
    assert sum(step.get("tokens", 0) for step in detail["steps"]) > 0
