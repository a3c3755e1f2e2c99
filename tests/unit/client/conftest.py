"""Fixture for the client's tests: a worker's loop among fakes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds.client_desk import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    opened = Desk(tmp_path)
    yield opened
    opened.close()
