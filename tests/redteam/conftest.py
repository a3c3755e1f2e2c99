"""One warm policy and its calibration for all attacks."""

from collections.abc import Iterator

import pytest
import torch

from muster.lab.redteam.stage import Stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    stage = Stage(tmp_path_factory.mktemp("redteam"), warm_up_steps=100)
    yield stage
    stage.close()
