"""Fixtures for tests of networks: no test leaves a process behind."""

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_warm_child_is_left() -> Iterator[None]:
    """Fail a test that leaves a process: all later tests would run beside it."""
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

    monkeypatch.setattr(loading, "load_transformers", lambda *_, **__: lambda *_: HashEngine())
