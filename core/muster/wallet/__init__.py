"""Encrypted keystores (Web3 Secret Storage, version 3), their passwords, and recovery words.

Owns every byte of private key on disk. Keys leave this module only as `Wallet.key`; they are in no
`repr`, log line or error message. The same holds for recovery words (BIP-39), from which any wallet
derives the same account (the first of BIP-44).
"""

import json
import math
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from muster.protocol.eip712 import address_of
from muster.protocol.errors import EncodingError, MusterError, WalletError
from muster.protocol.ids import Address, to_address

PASSWORD_VARIABLE = "MUSTER_PASSWORD"
"""Environment variable with the password, for processes without a terminal."""
SCRYPT_N = 1 << 18
"""Work factor for people: about a second and 256 MiB for each guess of the password."""
LIGHT_SCRYPT_N = 1 << 12
"""Work factor for worthless keys: accounts of a development chain."""
MAX_KEYSTORE_BYTES = 64 * 1024
"""Most bytes of a keystore file."""
MAX_KEYSTORE_COST = 1 << 25
"""Bound on n * r * p, or the rounds, of a keystore: a larger one would exhaust memory."""


@dataclass(frozen=True, slots=True)
class Wallet:
    """An opened account."""

    address: Address
    """The account."""
    key: bytes = field(repr=False)
    """Its private key, 32 bytes."""

    def __reduce__(self) -> Any:
        raise TypeError("a wallet is never pickled")


def create_wallet(path: Path, password: str, *, light: bool = False) -> Wallet:
    """Create a random account and return it; its encrypted keystore is the file `path`, mode 0600.

    `light` derives the file's key in milliseconds, which is only safe on development chains.
    Raises WalletError when the file exists: an account is never overwritten.
    """
    return save_wallet(path, secrets.token_bytes(32), password, light=light)


def save_wallet(path: Path, key: bytes, password: str, *, light: bool = False) -> Wallet:
    """Write the keystore of an existing key and return its wallet; as `create_wallet` otherwise."""
    from eth_keyfile.keyfile import create_keyfile_json

    if not password:
        raise WalletError("the password is empty", hint="choose a password")
    wallet = Wallet(address_of(key), key)
    iterations = LIGHT_SCRYPT_N if light else SCRYPT_N
    document = create_keyfile_json(key, password.encode(), kdf="scrypt", iterations=iterations)
    write_private(path, json.dumps(document).encode())
    return wallet


def load_wallet(path: Path, password: str) -> Wallet:
    """Return the account of a keystore; raises WalletError when it cannot be opened."""
    from eth_keyfile.keyfile import decode_keyfile_json

    document = _read_keystore(path)
    try:
        key = decode_keyfile_json(document, password.encode())
    # With hostile JSON the library may raise any of these errors.
    except (ValueError, TypeError, KeyError, AttributeError, LookupError, MemoryError) as error:
        if "MAC mismatch" in str(error):
            raise WalletError(
                f"wrong password for {path}",
                hint=f"check the password file or {PASSWORD_VARIABLE}",
            ) from None
        raise _malformed(path) from None
    try:
        wallet = Wallet(address_of(key), key)
        is_consistent = "address" not in document or to_address(_hex_address(document)) == (
            wallet.address
        )
    except MusterError:
        raise _malformed(path) from None
    if not is_consistent:
        raise WalletError(
            f"{path} states another address than its key has",
            hint="the file was altered: restore it from a backup",
        )
    return wallet


def open_wallet(
    keystore: Path,
    password_file: Path | None,
    *,
    what: str = "keystore",
    environ: Mapping[str, str] = os.environ,
) -> Wallet:
    """Return the account of a keystore; see `read_password` for the source of the password."""
    return load_wallet(keystore, read_password(password_file, what=what, environ=environ))


def keystore_address(path: Path) -> Address:
    """Return the account that a keystore states, without its password; raises WalletError."""
    try:
        return to_address(_hex_address(_read_keystore(path)))
    except EncodingError:
        raise _malformed(path) from None


def read_password(
    password_file: Path | None,
    *,
    confirm: bool = False,
    what: str = "keystore",
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Return the password from the file, else `MUSTER_PASSWORD`, else the terminal.

    Raises WalletError when the file cannot be read, or there is no terminal to ask at.
    """
    if password_file is not None:
        return _password_in(password_file)
    if PASSWORD_VARIABLE in environ:
        return environ[PASSWORD_VARIABLE]
    if not sys.stdin.isatty():
        raise WalletError(
            f"no password for the {what}",
            hint=f"give --password-file, or set {PASSWORD_VARIABLE}",
        )
    password: str = click.prompt(
        f"Password of the {what}", hide_input=True, confirmation_prompt=confirm, err=True
    )
    return password


def _password_in(file: Path) -> str:
    try:
        password = file.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise WalletError(f"cannot read the password file {file}: {reason}") from None
    if not password:
        raise WalletError(f"the password file {file} is empty")
    return password


def _read_keystore(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEYSTORE_BYTES + 1)
    except FileNotFoundError:
        raise WalletError(
            f"there is no keystore at {path}",
            hint=f"create one: {shlex.join(['muster', 'wallet', 'new', str(path)])}",
        ) from None
    except OSError as error:
        raise WalletError(f"cannot read {path}: {error.strerror}") from None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise _malformed(path) from None
    if len(data) > MAX_KEYSTORE_BYTES or not _is_keystore(document):
        raise _malformed(path)
    return {str(name).lower(): value for name, value in document.items()}


def _is_keystore(document: Any) -> bool:
    """Return whether this is a version 3 keystore that can be opened at a bounded cost."""
    if not isinstance(document, dict):
        return False
    parts = {str(name).lower(): value for name, value in document.items()}
    crypto = parts.get("crypto")
    if parts.get("version") != 3 or not isinstance(crypto, dict):
        return False
    parameters = crypto.get("kdfparams")
    if not isinstance(parameters, dict):
        return False
    if crypto.get("kdf") == "scrypt":
        costs = [parameters.get(name) for name in ("n", "r", "p")]
    elif crypto.get("kdf") == "pbkdf2":
        costs = [parameters.get("c")]
    else:
        return False
    numbers = [cost for cost in costs if type(cost) is int and cost > 0]
    return len(numbers) == len(costs) and math.prod(numbers) <= MAX_KEYSTORE_COST


def _hex_address(document: Mapping[str, Any]) -> str:
    address = document.get("address")
    if not isinstance(address, str):
        raise EncodingError("a keystore without an address")
    # Keystores of other programs write it without prefix and in any case.
    return "0x" + address.lower().removeprefix("0x")


def _malformed(path: Path) -> WalletError:
    return WalletError(
        f"{path} is not a version 3 keystore",
        hint="restore the file from a backup, or create another keystore: muster wallet new FILE",
    )


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read, and that survives a power failure.

    Raises WalletError when it exists, or cannot be written; then nothing of it is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise WalletError(
            f"{path} exists already, and an account is never overwritten",
            hint="choose another name, or show it: muster wallet show FILE",
        ) from None
    except OSError as error:
        raise _cannot_write(path, error) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(path.parent)
    except OSError as error:
        # Half a file would pass for an account at the next try.
        with suppress(OSError):
            path.unlink()
        raise _cannot_write(path, error) from None


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> WalletError:
    return WalletError(f"cannot write {path}: {error.strerror}")


# Recovery words

RECOVERY_PATH = "m/44'/60'/0'/0/0"
"""Derivation path of the account that wallets show first."""
WORDS = 12
"""Number of new recovery words: 128 bits, as strong as the key itself."""
WORD_COUNTS = (12, 15, 18, 21, 24)
"""Word counts that BIP-39 allows."""
MAX_WORDS_BYTES = 1024
"""Most bytes of a file with recovery words."""


def new_words() -> str:
    """Return fresh recovery words, separated by single blanks."""
    from eth_account.hdaccount import generate_mnemonic
    from eth_account.types import Language

    return generate_mnemonic(WORDS, Language.ENGLISH)


def key_of_words(words: str) -> bytes:
    """Return the private key of the words' first account.

    Case and spacing do not matter. Raises WalletError for a wrong count, a word that is in no list
    or words whose checksum is wrong; it names places, never words.
    """
    from eth_account.hdaccount import key_from_seed, seed_from_mnemonic

    normal = words.lower().split()
    _check(normal)
    return bytes(key_from_seed(seed_from_mnemonic(" ".join(normal), ""), RECOVERY_PATH))


def read_words(file: Path) -> str:
    """Return the words in a file; raises WalletError when it cannot be read."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_WORDS_BYTES + 1)
        if len(data) > MAX_WORDS_BYTES:
            raise WalletError(f"{file} is too large to hold recovery words")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise WalletError(f"cannot read the recovery words in {file}: {reason}") from None


def write_words(file: Path, words: str) -> None:
    """Write the words to a new file that only its owner can read; raises WalletError."""
    write_private(file, words.encode() + b"\n")


def _check(words: list[str]) -> None:
    from eth_account.hdaccount.mnemonic import Mnemonic
    from eth_account.types import Language

    if len(words) not in WORD_COUNTS:
        raise WalletError(
            f"{len(words)} recovery words, there are {', '.join(map(str, WORD_COUNTS[:-1]))} or "
            f"{WORD_COUNTS[-1]}",
            hint="type all of them, in order, separated by blanks",
        )
    english = Mnemonic(Language.ENGLISH)
    known = set(english.wordlist)
    unknown = [str(place) for place, word in enumerate(words, 1) if word not in known]
    if unknown:
        raise WalletError(
            f"not a recovery word: number {', '.join(unknown)}",
            hint="check the spelling: English BIP-39 words only",
        )
    if not english.is_mnemonic_valid(" ".join(words)):
        raise WalletError(
            "the recovery words' checksum is wrong", hint="a word is wrong, or two are swapped"
        )
