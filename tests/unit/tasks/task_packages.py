"""Packages of third parties, as pip would have installed them."""

from pathlib import Path

import pytest
from hypothesis import strategies as st

from muster.tasks import Problem, TaskSet, registry


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, entry_points: str) -> None:
    """Make `third_party` importable here and in child processes, with its entry points."""
    (folder / "third_party.py").write_text(source)
    info = folder / "third_party-1.2.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(__import__("sys").modules, "third_party", raising=False)
    registry.installed_verifiers.cache_clear()
    registry.installed_makers.cache_clear()


def forget() -> None:
    """Let the next test see its own packages."""
    registry.installed_verifiers.cache_clear()
    registry.installed_makers.cache_clear()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


OBJECTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)


PROBLEMS = st.builds(
    Problem,
    problem_id=st.text(min_size=1, max_size=20),
    source=st.text(max_size=20),
    task_type=st.text(min_size=1, max_size=20),
    in_source_id=st.none() | st.text(max_size=10),
    prompt=st.text(min_size=1, max_size=40),
    gold_standard_solution=st.none() | st.text(max_size=20),
    verification_info=OBJECTS,
    metadata=OBJECTS,
)


TASK_SETS = st.builds(
    TaskSet.of,
    st.text(min_size=1, max_size=20),
    st.text(min_size=1, max_size=20),
    st.lists(PROBLEMS, min_size=1, max_size=4, unique_by=lambda p: p.problem_id),
)
