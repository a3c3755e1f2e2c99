"""Policies and an engine for the inference tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from inference_policy import HonestWork, build_policy

from muster.inference import calibrate
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def sibling_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("sibling"), seed=1, training_steps=20)


@pytest.fixture
def engine(policy_folder: Path) -> TransformersEngine:
    engine = TransformersEngine()
    engine.load_policy(policy_folder, PolicyVersion(0))
    return engine


@pytest.fixture(scope="session")
def honest_work() -> HonestWork:
    return HonestWork()


@pytest.fixture(scope="module")
def honest_once(honest_work: HonestWork) -> Iterator[None]:
    """Let calibrations share their measurements of honest work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "measure_honest", honest_work.measure)
        yield
