"""The trainer's ports to the outside: the training stream, files, the chain, figures."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import httpx

from muster.api import OrchestratorApi
from muster.chain import Chain, ChainView, Event, StreamItem
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ApiError, ContractRevert
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord
from muster.protocol.seeds import ticket_seed

GONE = frozenset({404, 410})
"""HTTP statuses that mean that a source does not have a file."""
DAMAGED = "bad_answer"
"""Code of the error of a source that sent other bytes than the file's."""
RELAY_S = 20.0
"""Deadline in seconds for one relay to deliver a file: 64 MiB at 3.3 MB/s."""
MOST_RELAYS = 8
"""Most relays that are asked for one file."""


class RelaysSilent(ApiError):
    """The orchestrator does not have a file, and a relay does not say whether it has the file.

    `silent_s` is the shortest time in seconds for which such a relay has not answered.
    """

    def __init__(self, message: str, *, status: int, code: str, silent_s: float) -> None:
        super().__init__(message, status=status, code=code)
        self.silent_s = silent_s


class FileSource(Protocol):
    """Source of submission files; it need not be trusted."""

    async def file(self, submission_file_hash: Hash32) -> bytes | None:
        """Return a submission's file; None once it is given up. Raises ApiError, with a status in
        GONE when nobody has the file now, RelaysSilent when a relay may have it.
        """


class Files:
    """Submission files from the run's orchestrator; those that it lacks or has damaged, from the
    run's relays.
    """

    def __init__(
        self,
        api: OrchestratorApi,
        run_id: RunId,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._run_id = run_id
        self._transport = transport
        self._clock = clock
        self._silent_since: dict[str, float] = {}

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return a file with this hash; otherwise raises the orchestrator's ApiError, or
        RelaysSilent.
        """
        try:
            return await self._api.file(submission_file_hash)
        except ApiError as error:
            if error.status not in GONE and error.code != DAMAGED:
                raise
            found = await self._from_relays(submission_file_hash)
            if isinstance(found, bytes):
                return found
            if not found or error.code == DAMAGED:
                raise
            silent_s = self._clock() - max(self._silent_since[url] for url in found)
            raise RelaysSilent(
                f"{error}; {len(found)} of its relays do not say whether they have it: "
                + ", ".join(httpx.URL(url).host for url in found),
                status=error.status,
                code=error.code,
                silent_s=silent_s,
            ) from error

    async def _from_relays(self, submission_file_hash: Hash32) -> bytes | list[str]:
        """Return the file from a relay's room, or else the relays that are silent. Rooms hold what
        workers committed directly, which the orchestrator may never have had.
        """
        silent = []
        for url in (await self._api.run_info(self._run_id)).relays[:MOST_RELAYS]:
            try:
                async with (
                    OrchestratorApi(url, transport=self._transport) as relay,
                    asyncio.timeout(RELAY_S),
                ):
                    return await relay.file(submission_file_hash)
            except (ApiError, TimeoutError) as error:
                if not isinstance(error, ApiError) or error.status not in GONE:
                    silent.append(url)
        now_s = self._clock()
        self._silent_since = {url: self._silent_since.get(url, now_s) for url in silent}
        return silent


class MetricsSink(Protocol):
    """A place that shows figures."""

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the figures of a step; raises ApiError."""


class ChainLedger:
    """A run's training stream in the chain view, which calls `on_change` at every change."""

    def __init__(self, view: ChainView, run_id: RunId) -> None:
        self._view = view
        self._run_id = run_id
        self._stream: Sequence[StreamItem] | None = None
        self._event = asyncio.Event()

    def stream(self) -> Sequence[StreamItem]:
        """Return the training stream."""
        if self._stream is None:
            is_known = self._run_id in self._view.runs
            self._stream = self._view.training_stream(self._run_id) if is_known else ()
        return self._stream

    def is_direct(self, item: StreamItem) -> bool:
        """Return whether the record's worker committed its file, and no batch of the orchestrator
        had it before: the orchestrator may never have had the file.
        """
        batch = self._view.batches.get(item.batch_id)
        return batch is not None and batch.direct is not None and batch.split_from is None

    @property
    def is_closed(self) -> bool:
        """Whether the run's owner closed the run."""
        run = self._view.runs.get(self._run_id)
        return run is not None and bool(run.closed_at)

    @property
    def orchestrator(self) -> Address | None:
        """The account that the run names as its orchestrator now; None until the run is seen."""
        run = self._view.runs.get(self._run_id)
        return None if run is None else run.config.orchestrator

    def seed_of(self, record: OutcomeRecord) -> Hash32 | None:
        """Return the seed of a record's ticket; None when the chain does not show its inputs."""
        run = self._view.runs.get(self._run_id)
        checkpoint = run and run.checkpoints.get(record.policy_version)
        worker = self._view.worker_by_id.get(record.worker_id)
        member = run.members.get(worker.address) if run and worker else None
        if not checkpoint or not member:
            return None
        beacon = member.beacon_under(checkpoint)
        return ticket_seed(self._run_id, beacon, member.address, record.step, record.index)

    async def changed(self) -> None:
        """Return after the next change."""
        await self._event.wait()

    async def on_change(self, _events: list[Event]) -> None:
        """Note that the view has added events, or removed some after a reorganisation."""
        self._stream = None
        self._event.set()
        self._event = asyncio.Event()


class PolicyRoots:
    """The manifest roots of a run's policy versions: its checkpoints in RunRegistry."""

    def __init__(self, chain: Chain, run_id: RunId) -> None:
        self._chain = chain
        self._run_id = run_id

    async def root_of(self, version: PolicyVersion) -> Hash32 | None:
        """Return the manifest root of a published version, None when there is none."""
        try:
            checkpoint = await self._chain.runs.checkpoint_of(self._run_id, version)
        except ContractRevert as revert:
            if revert.name != "RunVersionUnknown":
                raise
            return None
        return checkpoint.manifest_root if any(checkpoint.manifest_root) else None

    async def newest(self) -> PolicyVersion | None:
        """Return the newest published version."""
        return await self._chain.runs.latest_version(self._run_id)

    async def settle(self) -> None:
        """Return when nothing that was sent before is on its way any more. Raises ChainError."""
        if self._chain.sender is not None:
            await self._chain.sender.recover()

    async def recent_roots(self, versions: int) -> dict[PolicyVersion, Hash32]:
        """Return the roots of the newest published version and those up to `versions` before it."""
        newest = await self.newest()
        if newest is None:
            return {}
        wanted = [PolicyVersion(v) for v in range(max(0, newest - versions), newest + 1)]
        roots = {version: await self.root_of(version) for version in wanted}
        return {version: root for version, root in roots.items() if root is not None}

    async def publish(self, version: PolicyVersion, root: Hash32) -> None:
        """Publish a version; further calls for it do nothing. Raises ChainError."""
        chain = self._chain.once(f"publish run {self._run_id} version {version} {hex0x(root)}")
        await chain.runs.publish_checkpoint(self._run_id, version, root)
