"""The muster command: quick help, and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import click
import pytest

from muster.devnet import cli
from muster.devnet.cli import COMMANDS, main, muster
from muster.protocol.errors import ConfigError

HEAVY = ("torch", "transformers", "vllm", "web3", "pyarrow", "matplotlib", "sqlalchemy")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    script = (
        "import json, sys; from muster.devnet.cli import muster\n"
        "muster(['--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
        )
        times.append(time.perf_counter() - start)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert not set(HEAVY) & {name.split(".")[0] for name in loaded}
    assert min(times) < 0.4


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_loads_and_has_help(name: str) -> None:
    command = muster.get_command(click.Context(muster), name)
    assert command is not None
    assert command.help


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(click.UsageError, match="No such command 'nonsense'"):
        muster(["nonsense"], standalone_mode=False)


def _raise(error: BaseException) -> click.Command:
    def callback() -> None:
        raise error

    return click.Command("demo", callback=callback)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ConfigError("port 1 is taken", hint="use --port"),
            "error: port 1 is taken\nhint: use --port\n",
        ),
        (
            ModuleNotFoundError("x", name="torch"),
            "error: torch is not installed\nhint: pip install 'muster-rl[model]'\n",
        ),
        (
            OSError(28, "No space left on device", "runs/x"),
            "error: No space left on device: runs/x\n"
            "hint: the disk is full: free some space, then run the same command again\n",
        ),
        (PermissionError(13, "Permission denied", "k"), "check who owns the path"),
    ],
)
def test_errors_are_lines_not_tracebacks(
    error: Exception,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "muster", _raise(error))
    monkeypatch.setattr(sys, "argv", ["muster"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert expected in capsys.readouterr().err


def test_interruption_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "muster", _raise(KeyboardInterrupt()))
    monkeypatch.setattr(sys, "argv", ["muster"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


def test_defects_of_our_own_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "muster", _raise(ZeroDivisionError()))
    monkeypatch.setattr(sys, "argv", ["muster"])
    with pytest.raises(ZeroDivisionError):
        main()
