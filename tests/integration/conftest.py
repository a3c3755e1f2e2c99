"""Shared by the tests of networks: none of them leaves a process behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_warm_child_is_left() -> Iterator[None]:
    """Fail the test that leaves one: it would be there for all tests after it."""
    yield
    left = multiprocessing.active_children()
    for child in left:
        child.kill()
    assert not left


@pytest.fixture
def hash_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands that load a model load the hash function of these networks."""
    from worlds.client_world import HashEngine

    from muster.inference import loading

    monkeypatch.setattr(loading, "load_transformers", lambda *_: lambda *_: HashEngine())
