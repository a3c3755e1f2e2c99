"""Anvil's binary: where it is on this machine, and how npm fetches it to one that has none."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from muster.protocol.errors import ConfigError

VERSION = "1.7.1"
"""The release that is tested, the one of package.json."""
_HINT = "look at the network and at npm's settings, or set MUSTER_ANVIL to an anvil"
FETCH_TIMEOUT_S = 600.0
"""For 15 MB, over a slow connection."""


def find_anvil() -> Path:
    """Return Anvil's binary: $MUSTER_ANVIL's, a checkout's, the PATH's, or what was fetched.

    Raises ConfigError when it is nowhere.
    """
    if named := os.environ.get("MUSTER_ANVIL"):
        if os.access(named, os.X_OK):
            return Path(named)
        raise ConfigError(f"MUSTER_ANVIL names no program: {named}")
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (binary := _binary_of(folder)) is not None:
            return binary
    if found := shutil.which("anvil"):
        return Path(found)
    if (binary := _binary_of(_cache())) is not None:
        return binary
    raise ConfigError(
        "anvil, the local chain, is not installed",
        hint="install Node.js 18 or newer with npm, which fetches it, or set MUSTER_ANVIL to one",
    )


def fetch_anvil(say: Callable[[str], None]) -> None:
    """Let npm fetch Anvil into this user's cache if it is nowhere else, and say so before.

    Blocking, at most FETCH_TIMEOUT_S. Raises ConfigError when npm is not there or fails.
    """
    npm = shutil.which("npm")
    try:
        find_anvil()
        return
    except ConfigError:
        if npm is None or shutil.which("node") is None or os.environ.get("MUSTER_ANVIL"):
            raise
    cache = _cache()
    say(f"npm fetches Anvil {VERSION} (15 MB) into {cache}, once")
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
        fresh = Path(scratch, "fresh")
        fresh.mkdir()
        _install(npm, fresh)
        if _binary_of(fresh) is None:
            raise ConfigError(f"npm brought no Anvil in {_package()}", hint=_HINT)
        # Whole or not at all; where another process was first, what it fetched is taken.
        with contextlib.suppress(OSError):
            fresh.rename(cache)
        if _binary_of(cache) is None:  # a cleaner took it and left the folder
            shutil.rmtree(cache)
            fresh.rename(cache)


def _install(npm: str, folder: Path) -> None:
    options = ["--ignore-scripts", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"]
    command = [npm, "install", "--prefix", str(folder), *options, f"{_package()}@{VERSION}"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        took = f"{FETCH_TIMEOUT_S:g} s"
        raise ConfigError(f"npm did not fetch Anvil within {took}", hint=_HINT) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(f"npm cannot fetch Anvil: {said[0]}", hint=_HINT)


def _package() -> str:
    """Return npm's name of the binary for this machine.

    Asked for by itself: as an optional part of `@foundry-rs/anvil` npm 9 leaves it out, because the
    package wants Node.js 20, which the binary does not need.
    """
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"@foundry-rs/anvil-{sys.platform}-{machine}"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "muster" / f"anvil-{VERSION}"


def _binary_of(folder: Path) -> Path | None:
    """Return the Anvil among a folder's npm packages."""
    # npm's own `anvil` is a script that starts this; ending the script would not end it.
    found = sorted(folder.glob("node_modules/@foundry-rs/anvil-*/bin/anvil"))
    return next((binary for binary in found if os.access(binary, os.X_OK)), None)
