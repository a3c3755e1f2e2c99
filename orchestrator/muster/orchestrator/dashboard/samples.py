"""Samples to read: prompts, completions and rewards of judged submissions.

Files are read in a process of their own (`sample_reader.py`), one at a time, only when somebody
looks, and never before their verdict: until then a file is nobody's to read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from muster.orchestrator.dashboard.tokenizer import RunTokenizer
from muster.orchestrator.services import Services
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Hash32
from muster.protocol.messages import Verdict

logger = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""A file that takes longer is not shown."""
MAX_OUTPUT_BYTES = 1 << 20
"""Longest answer of the reading process."""
MAX_WAITING = 4
"""Requests that may wait for a file; more are told to come back."""
KEPT = 64
"""Files whose samples are remembered."""
SHOWN_FILES = 3
"""Latest accepted submissions on the page of samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    problem_id: str
    """The problem, as the task set names it."""
    group: int
    """Its place in the submission."""
    sample: int
    """Its place in the group."""
    reward: float
    """Score of the task's verifier."""
    target_length: int
    """Length budget in tokens, -1 without one."""
    length: int
    """Completion tokens."""
    prompt: str
    completion: str
    """The completion, with the tokens that end it."""


@dataclass(frozen=True, slots=True)
class FileSamples:
    """The samples shown of one submission."""

    submission_id: str
    """Its file hash."""
    worker: str
    step: int
    """Rollout step."""
    policy_version: int
    """The policy that sampled."""
    samples: list[Sample]
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
        self._known: OrderedDict[Hash32, list[Sample]] = OrderedDict()

    @property
    def has_text(self) -> bool:
        """Whether samples are shown as text, not as token ids."""
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

    async def of(self, file_hash: Hash32) -> list[Sample]:
        """Return samples of a submission; none before its verdict, or when it cannot be shown."""
        if self._services.projection.judged(file_hash) is None:
            return []
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
            samples = [Sample(**each) for each in json.loads(output)]
        except (TimeoutError, OSError, ValueError, TypeError) as error:
            logger.warning("a file is not shown", extra={"file": path.name, "error": repr(error)})
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
            await child.wait()
    if code != 0:
        raise ValueError(f"the file cannot be read (exit code {code})")
    return output
