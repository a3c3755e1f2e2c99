from __future__ import annotations

from pathlib import Path

import pytest

from muster.chain import Anvil, anvil
from muster.chain.anvil import find_anvil
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
    with pytest.raises(ConfigError, match="MUSTER_ANVIL names no program: /nowhere/anvil"):
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
    """No repository around the package, nothing in the working folder."""
    monkeypatch.delenv("MUSTER_ANVIL", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(anvil, "__file__", str(tmp_path / "site-packages" / "anvil.py"))
    return tmp_path


def test_path_is_searched_last(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = program(nowhere / "bin" / "anvil")
    monkeypatch.setenv("PATH", str(installed.parent))
    assert find_anvil() == installed


@pytest.mark.usefixtures("nowhere")
def test_missing_binary_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="anvil is not installed") as error:
        find_anvil()
    assert "npm ci" in str(error.value.hint)


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
    deaf.write_text(f"#!/bin/sh\ntrap '' INT\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
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
