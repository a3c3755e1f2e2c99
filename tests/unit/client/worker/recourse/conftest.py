"""Fixture for the tests of a worker's recourse: a loop with its duty against silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds.client_silence import Silenced


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Silenced]:
    opened = Silenced(tmp_path)
    yield opened
    opened.close()
