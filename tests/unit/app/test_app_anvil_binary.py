import json
import platform
import stat
from pathlib import Path

import pytest

from muster.app import anvil
from muster.app.anvil import VERSION, Anvil, fetch_anvil, find_anvil
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ConfigError


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    return path


def test_named_binary_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = program(tmp_path / "my-anvil")
    monkeypatch.setenv("MUSTER_ANVIL", str(named))
    assert find_anvil() == named


def test_named_binary_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_ANVIL", "/nowhere/anvil")
    with pytest.raises(ConfigError, match="MUSTER_ANVIL is not an executable file: /nowhere/anvil"):
        find_anvil()


def test_native_binary_of_the_working_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = program(tmp_path / "node_modules/@foundry-rs/anvil-linux-amd64/bin/anvil")
    monkeypatch.delenv("MUSTER_ANVIL", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_anvil() == native


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is empty, and a package outside any repository."""
    monkeypatch.delenv("MUSTER_ANVIL", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(anvil, "__file__", str(tmp_path / "site-packages" / "anvil.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_path_is_searched_last(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = program(nowhere / "bin" / "anvil")
    monkeypatch.setenv("PATH", str(installed.parent))
    assert find_anvil() == installed


@pytest.mark.usefixtures("nowhere")
def test_missing_binary_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="anvil, the local chain, is not installed") as error:
        find_anvil()
    assert "Node.js" in str(error.value.hint)


def npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an npm that runs the script, and a Node.js, on the PATH."""
    for name in ("npm", "node"):
        program(folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


BRINGS = """
mkdir -p node_modules/@foundry-rs/anvil-some-machine/bin
echo "$@" > node_modules/words
: > node_modules/@foundry-rs/anvil-some-machine/bin/anvil
chmod +x node_modules/@foundry-rs/anvil-some-machine/bin/anvil
"""


def test_npm_fetches_the_pinned_release_once_and_says_so(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm(nowhere, BRINGS, monkeypatch)
    said: list[str] = []
    fetch_anvil(said.append)
    fetch_anvil(said.append)
    assert len(said) == 1
    assert VERSION in said[0]
    assert str(nowhere / "cache") in said[0]
    assert stat.S_IMODE(find_anvil().stat().st_mode) & 0o111
    (words,) = (nowhere / "cache").rglob("words")
    machine = "amd64" if platform.machine() == "x86_64" else "arm64"
    assert f"@foundry-rs/anvil-linux-{machine}@{VERSION}" in words.read_text().split()
    assert "--ignore-scripts" in words.read_text().split()
    # Only the fetched files are left, and nothing in the working folder.
    assert [path.name for path in (nowhere / "cache" / "muster").iterdir()] == [f"anvil-{VERSION}"]
    assert {path.name for path in nowhere.iterdir()} == {"bin", "cache"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'npm error: no network' >&2; exit 1",
            "npm cannot fetch Anvil: npm error: no network",
        ),
        ("exit 7", "exit status 7"),
        ("exit 0", "npm.s package @foundry-rs"),
    ],
)
def test_npm_that_fails_leaves_nothing_and_says_why(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    npm(nowhere, script, monkeypatch)
    with pytest.raises(ConfigError, match=said) as error:
        fetch_anvil(lambda _text: None)
    assert "MUSTER_ANVIL" in (error.value.hint or "")
    assert list((nowhere / "cache" / "muster").iterdir()) == []


def test_npm_that_takes_too_long_is_given_up(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm(nowhere, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(anvil, "FETCH_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=r"within 0\.1 s"):
        fetch_anvil(lambda _text: None)


def test_cache_that_lost_its_binary_is_fetched_again(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm(nowhere, BRINGS, monkeypatch)
    fetch_anvil(lambda _text: None)
    find_anvil().unlink()
    fetch_anvil(lambda _text: None)
    assert find_anvil().exists()


def test_another_process_may_have_been_first(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = (
        nowhere / "cache/muster" / f"anvil-{VERSION}/node_modules/@foundry-rs/anvil-x/bin/anvil"
    )
    npm(nowhere, f"{BRINGS}\nmkdir -p '{theirs.parent}'; cp \"$0\" '{theirs}'", monkeypatch)
    fetch_anvil(lambda _text: None)
    assert find_anvil() == theirs


@pytest.mark.usefixtures("nowhere")
def test_without_npm_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    said: list[str] = []
    with pytest.raises(ConfigError, match="is not installed") as error:
        fetch_anvil(said.append)
    assert (said, "npm" in (error.value.hint or "")) == ([], True)


def test_release_is_the_one_that_is_tested() -> None:
    package = json.loads((Path(__file__).parents[3] / "package.json").read_text())
    assert package["devDependencies"]["@foundry-rs/anvil"] == VERSION


async def test_anvil_that_ends_at_once_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_ANVIL", str(program(tmp_path / "anvil")))
    with pytest.raises(ConfigError, match="anvil ended with exit code 3") as error:
        await Anvil(log=tmp_path / "logs" / "anvil.log").__aenter__()
    assert "anvil.log" in str(error.value.hint)


async def test_anvil_that_never_answers_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = program(tmp_path / "anvil")
    deaf.write_text(f"#!/bin/sh\ntrap '' INT\necho $$ > '{tmp_path}/pid'\nexec sleep 60\n")
    monkeypatch.setenv("MUSTER_ANVIL", str(deaf))
    monkeypatch.setattr(anvil, "READY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(anvil, "STOP_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=r"did not answer within 0\.3 s"):
        await Anvil().__aenter__()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_development_keys_are_the_well_known_ones() -> None:
    assert address_of(Anvil.key(0)) == "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266"
    assert address_of(Anvil.key(9)) == "0xa0Ee7A142d267C1f36714E4a8F75612F20a79720"


@pytest.mark.parametrize("index", [-1, 10])
def test_other_development_keys_are_refused(index: int) -> None:
    with pytest.raises(ConfigError, match="numbered 0 to 9"):
        Anvil.key(index)
