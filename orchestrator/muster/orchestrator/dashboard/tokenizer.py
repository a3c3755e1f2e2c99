"""The tokenizer of a run's policies, so that people can read samples: given, or from relays.

Every version that the trainer publishes has the base model's tokenizer.json. It is believed when it
is what the manifest says whose root is on chain, like everything that workers load.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
from blake3 import blake3

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.manifest import FULL, MAX_MANIFEST_BYTES, Manifest

logger = logging.getLogger(__name__)

NAME = "tokenizer.json"
MAX_BYTES = 64 << 20
"""A larger tokenizer is not fetched."""
ASKED_VERSIONS = 5
"""Newest versions that each server is asked for; relays keep no more."""
TIMEOUT_S = 5.0
"""Longest that somebody who looks waits for it."""
RETRY_S = 30.0
"""Time between two attempts."""

Roots = Callable[[], Mapping[PolicyVersion, Hash32]]
"""Roots of the run's manifests, as the chain has them."""


class RunTokenizer:
    """Knows the tokenizer's file; asks origin and relays when somebody looks and none is given."""

    def __init__(
        self,
        run_id: RunId,
        roots: Roots,
        servers: Sequence[str],
        *,
        given: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_id = run_id
        self._roots = roots
        self._servers = [url.rstrip("/") for url in servers]
        self._monotonic = monotonic
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self.path = given
        """The file; None while none is known."""

    async def find(self) -> Path | None:
        """Return the file, fetched if need be; None when nobody delivers it."""
        async with self._asking:
            if self.path is None and self._servers and self._monotonic() - self._asked_at > RETRY_S:
                self._asked_at = self._monotonic()
                await self._fetch()
        return self.path

    async def _fetch(self) -> None:
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http,
            ):
                data = await self._ask(http)
        except TimeoutError:
            data = None
        if data is None:
            logger.info("no relay delivers the tokenizer", extra={"servers": len(self._servers)})
            return
        folder = tempfile.mkdtemp(prefix="muster-tokenizer-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        path = Path(folder) / NAME
        path.write_bytes(data)
        self.path = path

    async def _ask(self, http: httpx.AsyncClient) -> bytes | None:
        newest = sorted(self._roots().items(), reverse=True)[:ASKED_VERSIONS]
        for url in self._servers:
            for version, root in newest:
                try:
                    return await self._read(http, url, version, root)
                except (httpx.HTTPError, httpx.InvalidURL, EncodingError) as error:
                    logger.debug("no tokenizer", extra={"server": url, "error": repr(error)})
        return None

    async def _read(
        self, http: httpx.AsyncClient, url: str, version: PolicyVersion, root: Hash32
    ) -> bytes:
        """Return the file of a version; raises EncodingError when a server lies or has none."""
        path = f"{url}/v1/{self._run_id}/{version}/manifest"
        manifest = await _get(http, path, MAX_MANIFEST_BYTES)
        if keccak(manifest) != root:
            raise EncodingError("the manifest is not the one on chain")
        parsed = Manifest.from_bytes(manifest)
        files = [file for file in parsed.files if file.name == NAME and file.size <= MAX_BYTES]
        if parsed.kind != FULL or not files:
            raise EncodingError(f"the version is not broadcast with its {NAME}")
        data = bytearray()
        for digest in files[0].chunks:
            chunk = await _get(http, f"{url}/v1/chunks/{digest.hex()}", parsed.chunk_bytes)
            if blake3(chunk).digest() != digest:
                raise EncodingError("a chunk has other bytes than its hash says")
            data += chunk
        return bytes(data)


async def _get(http: httpx.AsyncClient, url: str, max_bytes: int) -> bytes:
    async with http.stream("GET", url) as response:
        response.raise_for_status()
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > max_bytes:
                raise EncodingError(f"an answer is longer than {max_bytes} bytes")
    return bytes(body)
