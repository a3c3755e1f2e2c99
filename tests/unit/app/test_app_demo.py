"""The demo's message when a process stopped too early."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.app.demo.processes import DemoProcess, Processes
from muster.app.demo.story import _require_alive
from muster.protocol.errors import ConfigError

JAILED = "error: worker 0x04 is jailed and may not work"
FOUND = "validator warning submission not accepted verdict=FRAUD detail=6 samples fail"


def child(folder: Path, name: str, log: str, exit_code: int | None) -> DemoProcess:
    path = folder / f"{name}.log"
    path.write_text(log)
    process: Any = SimpleNamespace(returncode=exit_code)
    return DemoProcess(name, process, path)


def test_an_honest_worker_that_was_convicted_is_shown_with_what_the_validators_found(
    tmp_path: Path,
) -> None:
    running = Processes(tmp_path, {})
    running.children = {
        "validator-1": child(tmp_path, "validator-1", f"judging\n{FOUND}\n", None),
        "honest-1": child(tmp_path, "honest-1", JAILED, 1),
    }
    cast = SimpleNamespace(members=[SimpleNamespace(name="honest-1", role="honest")])
    network: Any = SimpleNamespace(cast=cast, processes=running)
    with pytest.raises(ConfigError) as raised:
        _require_alive(network)
    assert JAILED in str(raised.value)
    assert str(raised.value).endswith(FOUND)
    assert "honest-1.log" in raised.value.hint


def test_a_worker_that_ended_because_the_run_is_over_is_fine(tmp_path: Path) -> None:
    running = Processes(tmp_path, {})
    running.children = {"honest-1": child(tmp_path, "honest-1", "run complete", 0)}
    cast = SimpleNamespace(members=[SimpleNamespace(name="honest-1", role="honest")])
    network: Any = SimpleNamespace(cast=cast, processes=running)
    _require_alive(network)
