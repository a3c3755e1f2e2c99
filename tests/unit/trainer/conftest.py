"""A tiny base model, built once, and one torch thread."""

from pathlib import Path

import pytest
import torch

from muster.trainer.base_model import WarmStart, build_base_model
from muster.trainer.learn.persistence import Weights
from muster.trainer.publish.policies import BASE, PolicyShelf

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, hardly warmed up."""
    folder = tmp_path_factory.mktemp("base") / "model"
    build_base_model(folder, seed=0, warm_start=WarmStart(steps=25, batch=64))
    return folder


@pytest.fixture
def base(model_folder: Path, tmp_path: Path) -> Weights:
    """The base model's weights."""
    shelf = PolicyShelf(tmp_path / "policies of the base")
    shelf.adopt(model_folder)
    return shelf.weights(BASE)
