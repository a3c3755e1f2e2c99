"""`muster shardcast`, from publish to verify, in processes of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from muster.app.cli import main
from muster.client.cli.shardcast import shardcast
from muster.protocol.errors import ConfigError, MusterError, PolicyUnavailable, StorageError
from muster.wallet import create_wallet

PASSWORD = "p"
WEIGHTS = Random(3).randbytes(300_000)
STRANGER = "0x" + "22" * 20


class Key(NamedTuple):
    """A keystore and its address."""

    file: Path
    address: str


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Key:
    file = tmp_path_factory.mktemp("key") / "key.json"
    return Key(file, create_wallet(file, PASSWORD, light=True).address)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WEIGHTS)
    return path


def muster(*words: object) -> Result:
    """Run a command in this process; raises what it raises."""
    arguments = [str(word) for word in words]
    environ = {"MUSTER_PASSWORD": PASSWORD}
    return CliRunner().invoke(shardcast, arguments, env=environ, catch_exceptions=False)


def refused(*words: object) -> MusterError:
    """Return the error that a command ends with."""
    environ = {"MUSTER_PASSWORD": PASSWORD}
    done = CliRunner().invoke(shardcast, [str(word) for word in words], env=environ)
    assert isinstance(done.exception, MusterError)
    return done.exception


@contextmanager
def serving(folder: Path, *words: object) -> Iterator[str]:
    """Run a command that serves until stopped; yields its URL."""
    ready = folder / f"ready-{len(list(folder.glob('ready-*')))}"
    command = ["shardcast", *map(str, words), "--port", "0", "--ready-file", str(ready)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from muster.app.cli import main; main()", *command],
        stderr=subprocess.PIPE,
        text=True,
        env={"MUSTER_PASSWORD": PASSWORD, "PATH": ""},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if f"{'relay' if words[0] == 'relay' else 'origin'} listens at" in line:
                yield line.split()[-1]
                break
        else:
            pytest.fail("the process did not come to serve")
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_file_goes_from_publish_over_a_relay_to_fetch_and_verify(
    tmp_path: Path, key: Key, weights: Path
) -> None:
    store, mirrored, into = tmp_path / "origin", tmp_path / "relay", tmp_path / "models"
    publishing = ("publish", weights, "--store", store, "--keystore", key.file)
    trusted = ("--signer", key.address)
    with (
        serving(tmp_path, *publishing, "--serve", "--link") as origin,
        serving(tmp_path, "relay", "--upstream", origin, *trusted, "--store", mirrored) as relay,
    ):
        fetched = muster("fetch", "--relay", relay, *trusted, "--into", into)
        assert (Path(fetched.stdout.strip()) / "model.safetensors").read_bytes() == WEIGHTS
        assert "300.0/300.0 kB" in fetched.stderr
        root = muster("ls", relay).stdout.split()[-1]
        assert muster("ls", store).stdout == muster("ls", relay).stdout
    assert muster("verify", into / "1" / "v0", "--root", root).stdout == (
        "run 1 version 0 model.safetensors: ok\n"
    )
    assert muster("verify", mirrored).stdout == "run 1 version 0 model.safetensors: ok\n"
    assert "is 0x" in str(refused("verify", into / "1" / "v0", "--root", "0x" + "00" * 32))


def test_second_publish_is_the_next_version(tmp_path: Path, key: Key, weights: Path) -> None:
    command = ("publish", weights, "--store", tmp_path / "o", "--keystore", key.file)
    first = muster(*command)
    weights.write_bytes(b"other")
    second = muster(*command)
    assert first.stdout.startswith("run 1 version 0: 300000 bytes in 1 files, 1 chunks, root 0x")
    assert second.stdout.startswith("run 1 version 1: 5 bytes in 1 files, 1 chunks, root 0x")
    assert key.address in first.stderr


def test_damage_is_found_by_verify(tmp_path: Path, key: Key, weights: Path) -> None:
    store = tmp_path / "o"
    muster("publish", weights, "--store", store, "--keystore", key.file)
    with serving(tmp_path, "publish", weights, "--store", store, "--keystore", key.file,
                 "--version", 0, "--serve") as origin:  # fmt: skip
        fetched = muster(
            "fetch", "--relay", origin, "--signer", key.address, "--into", tmp_path / "m"
        )
    folder = Path(fetched.stdout.strip())
    (folder / "model.safetensors").write_bytes(b"\0" * len(WEIGHTS))
    assert "1 chunks are damaged" in str(refused("verify", folder))
    (store / "runs/1/0/files/model.safetensors").write_bytes(WEIGHTS + b"!")
    assert muster("verify", store).exit_code == 0
    (store / "runs/1/0/files/model.safetensors").write_bytes(WEIGHTS[:-1])
    assert isinstance(refused("verify", store), StorageError)


def test_root_chooses_the_version_of_a_store_that_is_verified(
    tmp_path: Path, key: Key, weights: Path
) -> None:
    store = tmp_path / "o"
    publishing = ("publish", weights, "--store", store, "--keystore", key.file)
    roots = []
    for content in (WEIGHTS, b"other"):
        weights.write_bytes(content)
        roots.append(muster(*publishing).stdout.split()[-1])
    (store / "runs/1/0/files/model.safetensors").write_bytes(b"damaged")
    verified = muster("verify", store, "--root", roots[1])
    assert verified.stdout == "run 1 version 1 model.safetensors: ok\n"
    assert "1 chunks are damaged" in str(refused("verify", store, "--root", roots[0]))
    wrong = refused("verify", store, "--root", "0x" + "00" * 32)
    assert isinstance(wrong, StorageError)
    assert "has the root 0x00" in str(wrong)
    malformed = refused("verify", store, "--root", "0xzz")
    assert isinstance(malformed, ConfigError)
    assert str(malformed) == "not a root: 0xzz"


def test_version_of_another_signer_is_not_fetched(tmp_path: Path, key: Key, weights: Path) -> None:
    publishing = ("publish", weights, "--store", tmp_path / "o", "--keystore", key.file)
    with serving(tmp_path, *publishing, "--serve") as origin:
        error = refused("fetch", "--relay", origin, "--signer", STRANGER, "--into", tmp_path / "m")
    assert isinstance(error, PolicyUnavailable)
    assert "muster model fetch" in error.hint


def test_token_is_demanded_when_there_is_one(tmp_path: Path, key: Key, weights: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    token = ("--token-file", tmp_path / "token")
    publishing = ("publish", weights, "--store", tmp_path / "o", "--keystore", key.file)
    with serving(tmp_path, *publishing, "--serve", *token) as origin:
        fetching = ("fetch", "--relay", origin, "--signer", key.address, "--into", tmp_path / "m")
        assert isinstance(refused(*fetching, "--wait-s", 0), PolicyUnavailable)
        assert muster(*fetching, *token).exit_code == 0
        assert "does not answer as a relay does" in str(refused("ls", origin))
        assert muster("ls", origin, *token).stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("fetch", "--into", "m", "--relay", "http://a"), "a signer is missing"),
        (("fetch", "--into", "m", "--signer", STRANGER), "at least one relay"),
        (("fetch", "--into", "m", "--relay", "ftp://a", "--signer", STRANGER), "not a server's"),
        (("fetch", "--into", "m", "--relay", "http://a", "--signer", "0x1"), "is no account"),
        (("fetch", "--into", "m", "--relay", "http://a", "--root", "0xzz"), "not a root: 0xzz"),
        (("ls", "nowhere"), "nowhere is not a store"),
        (("verify", "nowhere"), "there is no manifest"),
    ],
)
def test_bad_input_is_refused_with_its_reason(
    words: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(*words)
    assert isinstance(error, ConfigError)
    assert reason in str(error)


def test_help_of_the_group_needs_neither_torch_nor_a_server() -> None:
    script = (
        "import sys; from muster.app.cli import muster\n"
        "muster(['shardcast', 'fetch', '--help'], standalone_mode=False)\n"
        "assert not {'torch', 'aiohttp', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=30)
    assert callable(main)
