"""A local development chain: starts Anvil, waits until it answers, ends it.

Uses the program that npm installed; if there is none, npm downloads it.
"""

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Self

from muster.chain.rpc import Rpc
from muster.lifecycle import die_with_parent, free_port
from muster.protocol.errors import ChainUnreachable, ConfigError
from muster.protocol.ids import Address

MNEMONIC = "test test test test test test test test test test test junk"
"""Mnemonic of the publicly known development accounts. Never use it for real money."""
READY_TIMEOUT_S = 10.0
"""Deadline for the first answer; on an idle machine Anvil answers within 0.1 s."""
STOP_TIMEOUT_S = 5.0
"""Seconds in which Anvil must write its state file and end."""


class Anvil:
    """A running Anvil; use as an async context manager.

    Mines one block per second and, if it is `instant`, also one per transaction. With a state file
    the chain survives the process. Port 0 takes any free port.
    """

    STILL_S = 100_000
    """The block time of a chain that mines only for transactions.

    Reorganise and revert only such a chain: `anvil_reorg` and `evm_revert` work in steps, and a
    block that is mined between them leaves a hole in the chain.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        state: Path | None = None,
        log: Path | None = None,
        block_time_s: float = 1,
        instant: bool = True,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self._port = port
        self._state = state
        self._log = log
        self._block_time_s = block_time_s
        self._instant = instant
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._stack = contextlib.ExitStack()

    @staticmethod
    def key(index: int) -> bytes:
        """Return the private key of a development account, funded from genesis (0 to 9)."""
        return _development_key(index)

    @property
    def rpc_url(self) -> str:
        """URL of its RPC endpoint."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Self:
        binary = find_anvil()
        self._port = self._port or free_port()
        if _is_taken(self._port):
            raise ConfigError(
                f"port {self._port} is in use",
                hint="stop the program that uses it, or choose another port",
            )
        self._process = await self._spawn(binary)
        try:
            await self._wait_until_ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def set_balance(self, account: Address, wei: int) -> None:
        """Give an account the chain's coin, to pay for gas."""
        async with Rpc(self.rpc_url) as rpc:
            await rpc.call("anvil_setBalance", account, hex(wei))

    async def _spawn(self, binary: Path) -> asyncio.subprocess.Process:
        log = self._open_log()
        command = [
            *(str(binary), "--host", "127.0.0.1", "--port", str(self._port), "--silent"),
            *("--block-time", f"{self._block_time_s:g}"),
            *(("--mixed-mining",) if self._instant else ()),
            *(("--state", str(self._state)) if self._state else ()),
            *self._arguments,
        ]
        # Own process group and streams: Ctrl-C must reach only us, and nobody waits for its pipes.
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def _open_log(self) -> IO[bytes]:
        if self._log is None:
            return self._stack.enter_context(tempfile.TemporaryFile())
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return self._stack.enter_context(self._log.open("ab"))

    async def _wait_until_ready(self) -> None:
        assert self._process is not None
        async with Rpc(self.rpc_url, timeout_s=2.0) as rpc:
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    while True:
                        if self._process.returncode is not None:
                            raise ConfigError(
                                f"anvil ended with exit code {self._process.returncode}",
                                hint=f"see {self._log}"
                                if self._log
                                else "check that the file of --state is complete",
                            )
                        with contextlib.suppress(ChainUnreachable):
                            await rpc.call("eth_chainId")
                            return
                        await asyncio.sleep(0.02)
            except TimeoutError as error:
                raise ConfigError(f"anvil did not answer within {READY_TIMEOUT_S:g} s") from error

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            # SIGINT makes it write its state file before it ends.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._stack.close()


@cache
def _development_key(index: int) -> bytes:
    from eth_account.hdaccount import key_from_seed

    if not 0 <= index < 10:
        raise ConfigError(f"development accounts are numbered 0 to 9, got {index}")
    return bytes(key_from_seed(_development_seed(), f"m/44'/60'/0'/0/{index}"))


@cache
def _development_seed() -> bytes:
    from eth_account.hdaccount import seed_from_mnemonic

    return seed_from_mnemonic(MNEMONIC, "")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


# The program

VERSION = "1.7.1"
"""The release that is tested, the one of package.json."""
_HINT = "check the network and npm's settings, or set MUSTER_ANVIL to the path of an anvil program"
FETCH_TIMEOUT_S = 600.0
"""For 15 MB, over a slow connection."""


def find_anvil() -> Path:
    """Return Anvil's binary, from $MUSTER_ANVIL, a checkout, the PATH or the download cache.

    Raises ConfigError when there is none.
    """
    if named := os.environ.get("MUSTER_ANVIL"):
        if os.access(named, os.X_OK):
            return Path(named)
        raise ConfigError(f"MUSTER_ANVIL is not an executable file: {named}")
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (binary := _binary_of(folder)) is not None:
            return binary
    if found := shutil.which("anvil"):
        return Path(found)
    if (binary := _binary_of(_cache())) is not None:
        return binary
    raise ConfigError(
        "anvil, the local chain, is not installed",
        hint="install Node.js 18 or newer with npm, or set MUSTER_ANVIL to the path of anvil",
    )


def fetch_anvil(say: Callable[[str], None]) -> None:
    """Let npm download Anvil into this user's cache if there is none; announces it first.

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
            raise ConfigError(f"npm's package {_package()} holds no Anvil", hint=_HINT)
        # The rename is atomic; if another process was first, its download is used.
        with contextlib.suppress(OSError):
            fresh.rename(cache)
        if _binary_of(cache) is None:  # a cache cleaner deleted the binary and left the folder
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

    It is requested directly: as an optional dependency of `@foundry-rs/anvil`, npm 9 skips it,
    because the package requires Node.js 20, which the binary does not need.
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
