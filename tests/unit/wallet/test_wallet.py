"""Keystores: written ones open, altered ones do not, and no key leaks."""

import errno
import json
import logging
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from eth_keyfile.keyfile import create_keyfile_json
from hypothesis import given, strategies as st

from muster import wallet as wallets
from muster.protocol.encoding import keccak
from muster.protocol.errors import SignatureError, WalletError
from muster.wallet import create_wallet, keystore_address, load_wallet, read_password, save_wallet

KEY = keccak(b"a key")


@pytest.fixture
def keystore(tmp_path: Path) -> Path:
    path = tmp_path / "keys" / "node.json"
    save_wallet(path, KEY, "secret", light=True)
    return path


def test_created_wallet_opens_again(tmp_path: Path) -> None:
    created = create_wallet(tmp_path / "a.json", "secret", light=True)
    assert load_wallet(tmp_path / "a.json", "secret") == created
    assert keystore_address(tmp_path / "a.json") == created.address


def test_created_wallets_differ(tmp_path: Path) -> None:
    first, second = (create_wallet(tmp_path / name, "s", light=True) for name in "ab")
    assert first.key != second.key


def test_keystore_is_readable_by_its_owner_only(keystore: Path) -> None:
    assert stat.S_IMODE(keystore.stat().st_mode) == 0o600


def test_keystore_costs_more_for_people_than_for_development(
    keystore: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wallets, "SCRYPT_N", 1 << 13)
    save_wallet(tmp_path / "full.json", KEY, "secret")
    costs = [
        json.loads(path.read_text())["crypto"]["kdfparams"]["n"]
        for path in (tmp_path / "full.json", keystore)
    ]
    assert costs == [1 << 13, wallets.LIGHT_SCRYPT_N]


def test_existing_keystore_is_never_overwritten(keystore: Path) -> None:
    before = keystore.read_bytes()
    with pytest.raises(WalletError, match="exists already"):
        create_wallet(keystore, "secret", light=True)
    assert keystore.read_bytes() == before


@pytest.mark.parametrize("synced", [stat.S_ISREG, stat.S_ISDIR])
def test_keystore_that_the_disk_refuses_leaves_its_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: Callable[[int], bool]
) -> None:
    def fsync(descriptor: int) -> None:
        if synced(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.json"
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fsync)
        with pytest.raises(WalletError, match=r"cannot write .*a\.json: No space left"):
            save_wallet(path, KEY, "secret", light=True)
    assert list(tmp_path.iterdir()) == []
    save_wallet(path, KEY, "secret", light=True)
    assert load_wallet(path, "secret").key == KEY


def test_wrong_password_is_named_with_a_hint(keystore: Path) -> None:
    with pytest.raises(WalletError, match="wrong password") as caught:
        load_wallet(keystore, "guess")
    assert "MUSTER_PASSWORD" in (caught.value.hint or "")


def test_missing_keystore_is_named_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(WalletError, match="there is no keystore") as caught:
        load_wallet(tmp_path / "my keys.json", "secret")
    assert caught.value.hint == f"create one: muster wallet new '{tmp_path}/my keys.json'"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version": 3}',
        b'{"version": 3, "crypto": {}}',
        b'{"version": 4, "crypto": {"kdf": "scrypt"}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * 100_000 + b"{}",
    ],
)
def test_malformed_keystore_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(WalletError, match="is not a version 3 keystore"):
        load_wallet(tmp_path / "bad.json", "secret")


@pytest.mark.parametrize(
    "parameters",
    [{"n": 1 << 40}, {"r": 1 << 30}, {"p": 1 << 30}, {"n": -1}, {"n": "8"}, {"n": True}],
)
def test_keystore_that_costs_too_much_to_open_is_refused(
    keystore: Path, parameters: dict[str, object]
) -> None:
    document = json.loads(keystore.read_text())
    document["crypto"]["kdfparams"] |= parameters
    keystore.write_text(json.dumps(document))
    with pytest.raises(WalletError, match="is not a version 3 keystore"):
        load_wallet(keystore, "secret")


def test_keystore_that_states_another_address_is_refused(keystore: Path) -> None:
    document = json.loads(keystore.read_text())
    document["address"] = "00" * 20
    keystore.write_text(json.dumps(document))
    with pytest.raises(WalletError, match="states another address"):
        load_wallet(keystore, "secret")


def test_keystores_of_other_programs_open(tmp_path: Path) -> None:
    document = create_keyfile_json(KEY, b"secret", kdf="pbkdf2", iterations=1000)
    shouted = {"Crypto": document["crypto"], "Version": 3, "id": document["id"]}
    (tmp_path / "other.json").write_text(json.dumps(shouted))
    assert load_wallet(tmp_path / "other.json", "secret").key == KEY


@given(st.data())
def test_damaged_keystores_open_unchanged_or_raise_wallet_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    document = create_keyfile_json(KEY, b"secret", kdf="scrypt", iterations=2)
    damaged = bytearray(json.dumps(document).encode())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "k.json"
    path.write_bytes(bytes(damaged))
    try:
        opened = load_wallet(path, "secret")
    except WalletError:
        return
    assert opened.key == KEY


def test_no_key_shows_in_a_wallet_its_log_or_its_errors(
    keystore: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = load_wallet(keystore, "secret")
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").debug("opened %r %s", opened, opened)
    shown = caplog.text + repr(opened) + str(opened)
    assert KEY.hex() not in shown
    assert repr(KEY) not in shown
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(opened)


def test_invalid_key_is_refused_without_showing_it(tmp_path: Path) -> None:
    with pytest.raises(SignatureError) as caught:
        save_wallet(tmp_path / "a.json", bytes(32), "secret", light=True)
    assert "00" * 8 not in str(caught.value)
    assert not (tmp_path / "a.json").exists()


def test_empty_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WalletError, match="empty"):
        create_wallet(tmp_path / "a.json", "", light=True)


def test_password_comes_from_the_file_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("from the file \r\n")
    environ = {"MUSTER_PASSWORD": "from the environment"}
    assert read_password(tmp_path / "p", environ=environ) == "from the file "
    assert read_password(None, environ=environ) == "from the environment"


def test_password_is_not_awaited_where_nobody_can_type() -> None:
    with pytest.raises(WalletError, match="no password") as caught:
        read_password(None, environ={})
    assert "--password-file" in (caught.value.hint or "")


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff"])
def test_unusable_password_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "p").write_bytes(content)
    with pytest.raises(WalletError, match="password file"):
        read_password(tmp_path / "p", environ={})
