"""Ports for processes that are about to be started."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from muster.lifecycle import ports
from muster.lifecycle.ports import free_port
from muster.protocol.errors import ConfigError


def test_port_can_be_listened_on_and_is_no_connection_s() -> None:
    port = free_port()
    with socket.socket() as listener, socket.socket() as connection:
        listener.bind(("127.0.0.1", port))
        connection.bind(("127.0.0.1", 0))
        assert 20_000 <= port < connection.getsockname()[1]


def test_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "range").write_text(f"{port + 1}\t60999\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(ports, "_FIRST", port)
    assert free_port() == port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        with pytest.raises(ConfigError, match=f"no port from {port} to {port} was found free"):
            free_port()


def test_same_seed_finds_other_ports() -> None:
    found = set()
    for _ in range(4):
        random.seed(7)
        found.add(free_port())
    assert len(found) > 1


def test_system_that_gives_all_ports_to_connections_has_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")
    assert 20_000 <= free_port() < 65_536


@pytest.mark.parametrize("said", ["", "none", None])
def test_system_that_says_nothing_has_the_usual_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None
) -> None:
    if said is not None:
        (tmp_path / "range").write_text(said)
    monkeypatch.setattr(ports, "_EPHEMERAL", tmp_path / "range")
    assert 20_000 <= free_port() < 32_768
