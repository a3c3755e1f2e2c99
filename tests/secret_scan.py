"""No secret in any log: what tests log and print is searched for the secrets that they use.

Secrets are noted where they are used in the test process: private keys where they sign, keystore
passwords where they open a keystore, signatures of API requests where they are made. Whatever has
the form of a bearer token or of a password in a URL counts by its form. A test whose log records or
output, its child processes' included, contain one fails; log files that tests leave behind fail the
session at its end.
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coincurve
import pytest
from eth_keyfile import keyfile

import muster.api.signing

_HEX = re.compile(r"[0-9a-fA-F]{64,}")
_FORMS = {
    "a bearer token": re.compile(r"[Bb]earer +[A-Za-z0-9._~+/=-]{8,}"),
    "a password in a URL": re.compile(r"[a-z]://[^\s/:@'\"]+:[^\s/@'\"*…]+@"),
}
_LOG_FILES = ("*.log", "*.err", "*.out", "stderr*", "stdout*")
LONGEST_FILE = 64 << 20
"""Bytes that are searched; of a larger log file only the beginning."""
SHORTEST_PASSWORD = 10
"""Shorter ones may be words that logs use."""
FEWEST_DISTINCT_BYTES = 6
"""A shorter key is a test's placeholder, which may also stand for a hash."""


class SecretScan:
    """A pytest plugin; one per session."""

    def __init__(self) -> None:
        self._by_hex: dict[str, str] = {}
        self._passwords: set[str] = set()
        self._in_files: list[str] = []
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ what is secret

    def note_key(self, key: bytes) -> None:
        """Remember a private key."""
        if len(key) == 32 and len(set(key)) >= FEWEST_DISTINCT_BYTES:
            self._by_hex[key.hex()] = "a private key"

    def note_signature(self, signature: bytes) -> None:
        """Remember the signature of an API request, by its first half."""
        self._by_hex[signature[:32].hex()] = "an API signature"

    def note_password(self, password: bytes) -> None:
        """Remember a keystore's password."""
        text = password.decode("utf-8", "replace")
        if len(text) >= SHORTEST_PASSWORD:
            self._passwords.add(text)

    def found_in(self, text: str) -> str | None:
        """Return what secret a text contains, or None."""
        for run in _HEX.findall(text):
            lower = run.lower()
            for start in range(len(lower) - 63):
                kind = self._by_hex.get(lower[start : start + 64])
                if kind is not None:
                    return kind
        for kind, form in _FORMS.items():
            if form.search(text):
                return kind
        if any(password in text for password in self._passwords):
            return "a keystore's password"
        return None

    # --------------------------------------------------------------------------- hooks

    def pytest_configure(self) -> None:
        """Start to note secrets."""
        self._wrap(coincurve.PrivateKey, "__init__", self._on_key)
        self._wrap(keyfile, "create_keyfile_json", self._on_password)
        self._wrap(keyfile, "decode_keyfile_json", self._on_password)
        self._wrap(muster.api.signing, "sign", self._on_signature)

    def pytest_unconfigure(self) -> None:
        """Stop noting secrets."""
        while self._undo:
            self._undo.pop()()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Fail the phase of a test in whose records or output a secret is."""
        report = yield
        for title, text in report.sections:
            kind = self.found_in(text)
            if kind is not None:
                report.outcome = "failed"
                report.longrepr = f"{title.lower()} contains {kind}"
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Search the log files that tests left behind."""
        factory = getattr(session.config, "_tmp_path_factory", None)
        folder = getattr(factory, "_basetemp", None)
        if folder is None:
            return
        for pattern in _LOG_FILES:
            for path in Path(folder).rglob(pattern):
                self._search_file(path)
        if self._in_files:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the files."""
        for line in self._in_files:
            terminalreporter.write_line(f"SECRET {line}", red=True)

    def _search_file(self, path: Path) -> None:
        try:
            if not path.is_file() or path.is_symlink():
                return
            with path.open("rb") as file:
                text = file.read(LONGEST_FILE).decode("utf-8", "replace")
        except OSError:
            return
        kind = self.found_in(text)
        if kind is not None:
            self._in_files.append(f"{path} contains {kind}")

    # -------------------------------------------------------------------------- wrappers

    def _on_key(self, args: tuple[Any, ...], kwargs: dict[str, Any], _result: Any) -> None:
        secret = kwargs.get("secret", args[1] if len(args) > 1 else None)
        if isinstance(secret, bytes):
            self.note_key(secret)

    def _on_password(self, args: tuple[Any, ...], _kwargs: dict[str, Any], _result: Any) -> None:
        self.note_password(args[1])

    def _on_signature(self, _args: tuple[Any, ...], _kwargs: dict[str, Any], result: Any) -> None:
        self.note_signature(result)

    def _wrap(self, owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            note(args, kwargs, result)
            return result

        setattr(owner, name, noting)
        self._undo.append(lambda: setattr(owner, name, original))
