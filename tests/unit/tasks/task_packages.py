"""Packages of third parties, as pip would have installed them, for tests of what they may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.tasks import registry


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
