"""Settings: precedence, and errors that say what to correct."""

import errno
import os
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from muster.chain.deployment import load_deployment
from muster.protocol.errors import ConfigError
from muster.settings import Settings, load_settings


class Example(Settings):
    port: Annotated[int, Field(ge=0, le=65535)] = 1
    host: str = "localhost"


def load(**kwargs: object) -> Example:
    return load_settings(Example, env_prefix="X_", **{"environ": {}, **kwargs})  # type: ignore[arg-type]


def test_defaults_hold_without_input() -> None:
    assert load() == Example(port=1, host="localhost")


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('port = 2\nhost = "toml"')
    assert load(file=file) == Example(port=2, host="toml")
    assert load(file=file, environ={"X_PORT": "3"}) == Example(port=3, host="toml")
    assert load(file=file, environ={"X_PORT": "3"}, flags={"port": 4}).port == 4


def test_flags_that_are_none_are_not_given() -> None:
    assert load(environ={"X_PORT": "3"}, flags={"port": None}).port == 3
    assert load(environ={"X_PORT": "3"}, flags={"port": ()}).port == 3


class OnAChain(Settings):
    run: int
    rpc: str = "http://default"
    deployments: Path = Path("default")


def on_a_chain(environ: dict[str, str], **flags: object) -> OnAChain:
    return load_settings(OnAChain, env_prefix="X_", environ=environ, flags={"run": 1, **flags})


def test_the_chain_of_every_process_comes_from_the_shared_variables() -> None:
    shared = {"MUSTER_RPC": "http://shared", "MUSTER_DEPLOYMENTS": "/shared", "MUSTER_RUN": "7"}
    assert on_a_chain(shared) == OnAChain(run=1, rpc="http://shared", deployments=Path("/shared"))
    assert on_a_chain({**shared, "X_RPC": "http://own"}).rpc == "http://own"
    assert on_a_chain(shared, rpc="http://flag").rpc == "http://flag"
    assert on_a_chain({}).rpc == "http://default"


def test_a_missing_setting_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match="setting 'run' is missing") as caught:
        load_settings(OnAChain, env_prefix="X_", environ={"MUSTER_RUN": "7"})
    assert caught.value.hint == "give --run, or set X_RUN"


def test_an_unknown_key_names_the_close_match(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("prot = 2")
    with pytest.raises(ConfigError, match="unknown setting 'prot'") as caught:
        load(file=file)
    assert caught.value.hint == "did you mean 'port'?"


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
def test_a_bad_value_names_the_setting(port: str) -> None:
    with pytest.raises(ConfigError, match="setting 'port'"):
        load(environ={"X_PORT": port})


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(file=tmp_path / "none.toml")


def test_a_file_of_others_is_refused_with_the_user_who_may_not_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    monkeypatch.setattr(os, "geteuid", lambda: 61234)
    for read in (lambda: load(file=tmp_path / "x.toml"), lambda: load_deployment(tmp_path, 5)):
        with pytest.raises(ConfigError, match="Permission denied") as caught:
            read()
        assert "let user 61234" in (caught.value.hint or "")


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe"])
def test_a_malformed_file_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(file=file)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Example().port = 5  # type: ignore[misc]
