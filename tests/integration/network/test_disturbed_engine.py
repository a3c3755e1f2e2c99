"""A real engine that is really disturbed: the known good sample shows it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from one_submission import CALIBRATION, judge, recipe, ticket

from muster.client.validator.checks import FailedCheck
from muster.client.validator.judging import Rules
from muster.client.validator.soundness import judge_generated
from muster.client.worker.generation import play_ticket, require_sound, require_sound_policy
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Reason
from muster.protocol.rollouts import Rollout
from muster.trainer.base_model import LESSONS, WarmStart, build_base_model

LIMIT = 16
RECIPE = recipe(problems=2, samples=4, limit=LIMIT)


@dataclass(frozen=True)
class Stage:
    """A model's folder, its run's rules, and a submission that was accepted."""

    folder: Path
    rules: Rules
    accepted: list[Rollout]

    def engine(self, kind: type[TransformersEngine] = TransformersEngine) -> TransformersEngine:
        engine = kind()
        engine.load_policy(self.folder, PolicyVersion(0))
        return engine

    def judge_accepted(self, engine: TransformersEngine) -> FailedCheck | None:
        return judge(self.accepted, ticket(0), self.rules, engine).finding


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("model")
    lesson = LESSONS["sort"]
    build_base_model(folder, seed=0, lesson=lesson, warm_start=WarmStart(steps=2, batch=8))
    tasks, _ = lesson.split(32, 4, 0)
    rules = Rules(RECIPE, tasks, CALIBRATION)
    threads = torch.get_num_threads()
    engine = TransformersEngine()
    engine.load_policy(folder, PolicyVersion(0))
    yield Stage(folder, rules, play_ticket(ticket(0), RECIPE, tasks, engine).graded())
    torch.set_num_threads(threads)


def corrupt(engine: TransformersEngine, seed: int) -> None:
    """Change the weights of a layer in memory."""
    noise = torch.Generator().manual_seed(seed)
    assert engine._policy is not None
    with torch.no_grad():
        for parameter in engine._policy.model.model.layers[0].parameters():
            parameter += torch.randn(parameter.shape, generator=noise)


class Decaying(TransformersEngine):
    """Its memory changes between generation and examination."""

    def examine(self, samples: Any, **recipe: Any) -> Any:
        corrupt(self, 0)
        return super().examine(samples, **recipe)


def test_a_sound_engine_passes_both_items(stage: Stage) -> None:
    engine = stage.engine()
    assert judge_generated(ticket(7), stage.rules, engine) is None
    assert stage.judge_accepted(engine) is None


def test_a_worker_whose_engine_is_disturbed_signs_nothing(stage: Stage) -> None:
    """Noticed within seconds; without this check honest workers were called frauds."""
    engine = stage.engine()
    require_sound_policy(stage.rules, engine)
    assert require_sound(stage.accepted, stage.rules, engine, 0.0) == len(stage.accepted)
    with pytest.raises(EngineError, match="own work fails its check"):
        require_sound_policy(stage.rules, stage.engine(Decaying))
    corrupt(engine, 2)
    for generating_s in (0.0, 1e6):
        with pytest.raises(EngineError, match="own work fails its check"):
            require_sound(stage.accepted, stage.rules, engine, generating_s)


def assert_found(finding: FailedCheck | None) -> None:
    assert finding is not None
    assert finding.reason in (Reason.TOPLOC_MISMATCH, Reason.SAMPLER_MISMATCH)


def test_an_engine_that_changes_from_call_to_call_fails_what_it_generates(stage: Stage) -> None:
    assert_found(judge_generated(ticket(7), stage.rules, stage.engine(Decaying)))


def test_an_engine_that_is_always_wrong_fails_what_was_accepted(stage: Stage) -> None:
    engine = stage.engine()
    corrupt(engine, 1)
    assert_found(stage.judge_accepted(engine))
