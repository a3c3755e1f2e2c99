"""Policies and an engine for the inference tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from inference_policy import build_policy

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
