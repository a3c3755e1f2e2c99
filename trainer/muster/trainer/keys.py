"""Opens the keystores (Web3 Secret Storage) of the run's owner and trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from muster.protocol.errors import WalletError

PASSWORD_VARIABLE = "MUSTER_PASSWORD"
"""Opens keystores when no password file is given."""


def open_keystore(
    keystore: Path, password_file: Path | None, environ: Mapping[str, str] = os.environ
) -> bytes:
    """Return the private key; the password is in `password_file`, else in MUSTER_PASSWORD.

    Raises WalletError when a file is missing or malformed, or the password is wrong.
    """
    from eth_keyfile.keyfile import decode_keyfile_json

    password = _password(password_file, environ)
    try:
        document = json.loads(keystore.read_text())
        return bytes(decode_keyfile_json(document, password.encode()))
    except OSError as error:
        raise WalletError(
            f"cannot read the keystore {keystore}: {error.strerror}",
            hint=f"create one: muster wallet new {keystore}",
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
        if "MAC mismatch" in str(error):
            raise WalletError(
                f"wrong password for {keystore}",
                hint=f"check the password file or {PASSWORD_VARIABLE}",
            ) from None
        raise WalletError(f"{keystore} is not a version 3 keystore") from None


def _password(password_file: Path | None, environ: Mapping[str, str]) -> str:
    if password_file is None:
        if PASSWORD_VARIABLE not in environ:
            raise WalletError(
                "no keystore password", hint=f"give --password-file or set {PASSWORD_VARIABLE}"
            )
        return environ[PASSWORD_VARIABLE]
    try:
        return password_file.read_text().rstrip("\r\n")
    except OSError as error:
        raise WalletError(f"cannot read {password_file}: {error.strerror}") from error
