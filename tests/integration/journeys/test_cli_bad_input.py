"""Bad input at the command line: one `error:` line that says what to do, never a traceback."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.app.cli import main
from muster.app.demo import story as demo
from muster.app.demo.story import prepare_folder
from muster.protocol.errors import ConfigError, StorageError
from muster.wallet import create_wallet

ROOT = Path(__file__).parents[3]
PASSWORD = "right"


Say = Callable[..., str]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command that must fail, and returns its output."""

    def run(*words: str, password: str = PASSWORD) -> str:
        monkeypatch.setenv("MUSTER_PASSWORD", password)
        monkeypatch.setattr(sys, "argv", ["muster", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (1, 2, 3)
        return capsys.readouterr().err

    return run


def say_apart(*words: str) -> str:
    """Run a command that must fail in a process of its own, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "muster.app", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode in (1, 2, 3), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def keystore(tmp_path: Path) -> Path:
    path = tmp_path / "key.json"
    create_wallet(path, PASSWORD, light=True)
    return path


@pytest.mark.parametrize(
    "command", [["stake", "--run", "1", "--yes"], ["rewards", "claim", "--run", "1"]]
)
def test_a_wrong_password_is_said_to_be_wrong(command: list[str], keystore: Path, say: Say) -> None:
    said = say(*command, "--keystore", str(keystore), password="wrong")
    assert f"error: wrong password for {keystore}" in said


def test_a_missing_keystore_says_how_to_make_one(tmp_path: Path, say: Say) -> None:
    said = say("stake", "--run", "1", "--yes", "--keystore", str(tmp_path / "none.json"))
    assert "error: there is no keystore" in said
    assert "muster wallet new" in said


@pytest.mark.parametrize("command", ["devnet", "demo"])
def test_a_port_in_use_is_named(command: str, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")] if command == "demo" else []
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        said = say_apart(command, "--port", port, "--deployments", str(tmp_path), *out)
    assert f"error: port {port} is in use" in said


def test_an_unknown_cheat_lists_the_known_ones(tmp_path: Path, say: Say) -> None:
    said = say("demo", "--cheat", "nonsense", "--out", str(tmp_path / "out"))
    assert "'nonsense' is not one of" in said
    assert "other-model" in said


def test_a_missing_recipe_is_named(tmp_path: Path, say: Say) -> None:
    said = say("demo", "--recipe", str(tmp_path / "none.toml"), "--out", str(tmp_path / "out"))
    assert "none.toml" in said


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a demo's folder"):
        prepare_folder(tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_the_folder_of_the_last_demo_is_emptied(tmp_path: Path) -> None:
    with prepare_folder(tmp_path / "demo"):
        (tmp_path / "demo" / "report.json").write_text("{}")
        (tmp_path / "demo" / "logs").mkdir()
    with prepare_folder(tmp_path / "demo"):
        assert [path.name for path in (tmp_path / "demo").iterdir()] == [demo.LOCK]


def test_the_folder_of_a_running_demo_is_left_alone(tmp_path: Path) -> None:
    with prepare_folder(tmp_path / "demo"):
        (tmp_path / "demo" / "report.json").write_text("{}")
        with pytest.raises(ConfigError, match="a demo is running in"):
            prepare_folder(tmp_path / "demo")
        assert (tmp_path / "demo" / "report.json").exists()


def test_a_full_disk_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FREE_BYTES", shutil.disk_usage(tmp_path).total * 2)
    with pytest.raises(StorageError, match="MiB are free") as caught:
        prepare_folder(tmp_path / "demo")
    assert caught.value.hint is not None
