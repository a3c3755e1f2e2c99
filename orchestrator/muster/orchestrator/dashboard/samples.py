"""Samples to read: prompts, completions and rewards of judged submissions.

Files are read in a separate process (`sample_reader.py`), one at a time, only when somebody views
the page, and never before their verdict: until then a file is not public.

Texts need the policy's tokenizer, from the settings or from relays. Every published version has the
base model's tokenizer.json. As with everything that workers load, it must match the manifest whose
root is on chain.
"""

import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from blake3 import blake3

from muster.lifecycle import environment_without_secrets
from muster.orchestrator.dashboard.health import get_bytes
from muster.orchestrator.services import Services
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Verdict
from muster.shardcast.manifest import FULL, MAX_MANIFEST_BYTES, Manifest

logger = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Deadline in seconds for reading a file."""
MAX_OUTPUT_BYTES = 1 << 20
"""Most bytes of the reading process's output."""
MAX_WAITING = 4
"""Most requests that wait for a file; further ones are told to retry."""
KEPT = 64
"""Files whose samples are cached."""
SHOWN_FILES = 3
"""Latest accepted submissions on the page of samples."""


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One completion."""

    problem_id: str
    """Id of the problem in the task set."""
    group: int
    """Index of the group in the submission."""
    sample: int
    """Index of the sample in the group."""
    reward: float
    """Score of the task's verifier."""
    target_length: int
    """Length budget in tokens; -1 if there is none."""
    length: int
    """Number of completion tokens."""
    prompt: str
    completion: str
    """The completion, with its end tokens."""


@dataclass(frozen=True, slots=True)
class FileSamples:
    """The samples shown of one submission."""

    submission_id: str
    """Its file hash."""
    worker: str
    step: int
    """Rollout step."""
    policy_version: int
    """Version of the policy that sampled."""
    samples: list[ShownSample]
    """The best and worst of some groups; empty when the file cannot be shown."""


class SampleCache:
    """Reads samples of judged files."""

    def __init__(self, services: Services) -> None:
        self._services = services
        settings, projection = services.settings, services.projection
        self._tokenizer = RunTokenizer(
            services.run_id,
            lambda: {v: c.manifest_root for v, c in projection.run.checkpoints.items()},
            [url for url in (settings.origin, *settings.relays) if url],
            given=settings.tokenizer,
        )
        self._reading = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[Hash32, list[ShownSample]] = OrderedDict()

    @property
    def has_text(self) -> bool:
        """Whether samples are shown as text instead of token ids."""
        return self._tokenizer.path is not None

    async def latest(self) -> list[FileSamples]:
        """Return samples of the latest accepted submissions."""
        accepted = self._services.projection.judged_with(Verdict.ACCEPTED)[-SHOWN_FILES:]
        workers = self._services.projection.view.worker_by_id
        return [
            FileSamples(
                submission_id=hex0x(judged.record.file_hash),
                worker=workers[judged.record.worker_id].address,
                step=judged.record.step,
                policy_version=judged.record.policy_version,
                samples=await self.of(judged.record.file_hash),
            )
            for judged in reversed(accepted)
        ]

    async def of(self, file_hash: Hash32) -> list[ShownSample]:
        """Return samples of a judged submission; none when it cannot be shown."""
        if not self.has_text and await self._tokenizer.find():
            self._known.clear()
        if file_hash not in self._known and self._waiting < MAX_WAITING:
            self._waiting += 1
            try:
                async with self._reading:
                    await self._read(file_hash)
            finally:
                self._waiting -= 1
        return self._known.get(file_hash, [])

    async def _read(self, file_hash: Hash32) -> None:
        if file_hash in self._known:
            return
        async with self._services.files.on_disk(file_hash) as path:
            if path is not None:
                await self._read_file(file_hash, path)

    async def _read_file(self, file_hash: Hash32, path: Path) -> None:
        tokenizer = self._tokenizer.path
        arguments = [str(path)] if tokenizer is None else [str(path), str(tokenizer)]
        try:
            output = await _run(arguments)
            samples = [ShownSample(**each) for each in json.loads(output)]
        except (TimeoutError, OSError, ValueError, TypeError) as error:
            logger.warning("cannot show a file", extra={"file": path.name, "error": repr(error)})
            samples = []
        self._known[file_hash] = samples
        while len(self._known) > KEPT:
            self._known.popitem(last=False)


async def _run(arguments: list[str]) -> bytes:
    """Return what the reading process prints; raises ValueError when it fails."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "muster.orchestrator.dashboard.sample_reader",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment_without_secrets(),
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            output = await child.stdout.read(MAX_OUTPUT_BYTES)
            while chunk := await child.stdout.read(MAX_OUTPUT_BYTES - len(output)):
                output += chunk
            code = await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()  # until its pipe is closed, too
    if code != 0:
        raise ValueError(f"the file cannot be read (exit code {code})")
    return output


# The policy's own tokenizer

NAME = "tokenizer.json"
MAX_BYTES = 64 << 20
"""Largest tokenizer that is fetched."""
ASKED_VERSIONS = 10
"""Number of newest versions that each server is asked for, besides the base model: at least every
tenth is broadcast with its files."""
TIMEOUT_S = 5.0
"""Longest time in seconds that a page waits for it."""
RETRY_S = 30.0
"""Time between two attempts."""

Roots = Callable[[], Mapping[PolicyVersion, Hash32]]
"""Returns the roots of the run's manifests on chain."""


class RunTokenizer:
    """Finds the tokenizer's file: the given one, or on demand from origin and relays."""

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
        """Return the file, fetched if necessary; None when no server delivers it."""
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
            logger.info("no relay has the tokenizer", extra={"servers": len(self._servers)})
            return
        folder = tempfile.mkdtemp(prefix="muster-tokenizer-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        path = Path(folder) / NAME
        path.write_bytes(data)
        self.path = path

    async def _ask(self, http: httpx.AsyncClient) -> bytes | None:
        roots = sorted(self._roots().items(), reverse=True)
        # Only version 0 of a run that trains an adapter is broadcast with its files.
        asked = dict(roots[:ASKED_VERSIONS] + roots[-1:])
        for url in self._servers:
            for version, root in asked.items():
                try:
                    return await self._read(http, url, version, root)
                except (httpx.HTTPError, httpx.InvalidURL, EncodingError) as error:
                    logger.debug("no tokenizer", extra={"server": url, "error": repr(error)})
        return None

    async def _read(
        self, http: httpx.AsyncClient, url: str, version: PolicyVersion, root: Hash32
    ) -> bytes:
        """Return the file of a version; raises EncodingError when the server's answer is wrong or
        missing."""
        path = f"{url}/v1/{self._run_id}/{version}/manifest"
        manifest = await get_bytes(http, path, MAX_MANIFEST_BYTES)
        if keccak(manifest) != root:
            raise EncodingError("the manifest is not the one on chain")
        parsed = Manifest.from_bytes(manifest)
        files = [file for file in parsed.files if file.name == NAME and file.size <= MAX_BYTES]
        if parsed.kind != FULL or not files:
            raise EncodingError(f"the version is not broadcast with its {NAME}")
        data = bytearray()
        for digest in files[0].chunks:
            chunk = await get_bytes(http, f"{url}/v1/chunks/{digest.hex()}", parsed.chunk_bytes)
            if blake3(chunk).digest() != digest:
                raise EncodingError("a chunk does not match its hash")
            data += chunk
        return bytes(data)
