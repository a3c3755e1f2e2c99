"""`muster relay run`: mirrors a run's policy weights, and stores files that judges need.

Connects the chain (published roots, work with a bond) to the mirror, the room and the
server of `muster.shardcast`. Nobody has to trust a relay: clients check every byte.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field, ValidationError

from muster.chain import ZERO_ADDRESS, BatchStatus, BatchView, Chain, ChainView, Event, follow
from muster.lifecycle import Proxies, run_beside, run_until_stopped
from muster.lifecycle.files import write_durably
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.errors import ChainError, ConfigError, ContractRevert
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import Submission
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Settings, Urls, load_settings
from muster.settings.flags import FILE, FOLDER, chain_options
from muster.telemetry import setup_logging

if TYPE_CHECKING:
    from muster.shardcast import ServerLimits, ShardServer, Trust


logger = logging.getLogger(__name__)

LOOK_S = 15.0
"""Seconds between two checks whether the run was closed."""
NO_ROOT = bytes(32)
"""Root on chain of a version that was never published."""


class RelaySettings(Settings):
    """How one relay mirrors one run."""

    run: Annotated[int, Field(ge=1)]
    """The run it mirrors."""
    upstream: Urls = ()
    """URLs of the origin or of other relays; empty to serve only the store's content."""
    rpc: str = DEFAULT_RPC
    """JSON-RPC endpoint of the chain."""
    deployments: Path = DEPLOYMENTS
    """Folder of deployment files, one per chain id."""
    store: Path = Path("relay")
    """Folder for chunks and manifests."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 5
    """How many of the newest versions are kept."""
    hold_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds for which older versions are kept, too; None for as long as outcomes of their work
    can be disputed. They give way where the disk is three quarters full."""
    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """Most bytes of chunks; older versions are deleted to make room, and a version is refused
    if it does not fit beside newer ones and the versions that deltas start from."""
    room_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes of submission files stored for judges of the network; 0 to store none."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    """Port to listen on; 0 for any free one."""
    ready_file: Path | None = None
    """File that receives the URL once the process listens."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 0.2
    """Minimum seconds between two polls of an upstream, or of the chain for one version."""
    linger_s: Annotated[float, Field(ge=0, le=31_536_000)] = 86_400.0
    """After the run was closed, the relay ends when nobody has fetched anything for this many
    seconds."""
    keep_going: bool = False
    """Serve a closed run until stopped."""
    token_file: Path | None = None
    """File with the bearer token that clients must show; without it none is required."""
    upstream_token_file: Path | None = None
    """File with the bearer token that the upstreams demand."""
    connections_per_address: Annotated[int, Field(ge=1)] = 128
    """Most open connections from one network address."""
    requests_per_s: Annotated[float, Field(gt=0)] = 500.0
    """Requests per second from one network address, sustained; bursts may be twice that."""
    trusted_proxies: str = ""
    """Addresses and networks of reverse proxies whose X-Forwarded-For counts, separated by
    commas."""


async def serve_relay(settings: RelaySettings) -> None:
    """Mirror and serve until cancelled, or until the run is closed and nobody has fetched for
    `linger_s`; raises ConfigError or ChainError when it cannot start.
    """
    from muster.shardcast import ChunkStore, FileRoom, Relay, ShardServer
    from muster.shardcast.metrics import ShardMetrics

    async with await Chain.connect(settings.rpc, settings.deployments) as chain:
        hold_s = settings.hold_s
        store = ChunkStore(
            settings.store,
            keep=settings.keep,
            hold_s=await chain.longest_open_s() if hold_s is None else hold_s,
            max_bytes=settings.max_bytes,
        )
        metrics = ShardMetrics()
        mirror = Relay(
            settings.upstream,
            store,
            run_id=RunId(settings.run),
            trust=await chain_trust(chain, RunId(settings.run)),
            poll_s=settings.poll_s,
            token=read_token(settings.upstream_token_file),
            metrics=metrics,
        )
        limits = limits_of(
            settings.connections_per_address, settings.requests_per_s, settings.trusted_proxies
        )
        await mirror.recheck()
        view, room = ChainView(), None
        guard = NamedWork(view, RunId(settings.run), chain.domain("ContributionLedger"))
        if settings.room_bytes:
            room = FileRoom(settings.store / "room", max_bytes=settings.room_bytes, admission=guard)
        async with ShardServer(
            store,
            settings.host,
            settings.port,
            limits=limits,
            token=read_token(settings.token_file),
            wanted=mirror.wanted,
            metrics=metrics,
            room=room,
        ) as server:
            announce(server, "relay", settings.ready_file)
            beside = [mirror.run()]
            if room is not None:
                poll_s = settings.poll_s
                beside.append(follow(chain, view, poll_s=poll_s, on_change=guard.on_change))
            if settings.keep_going:
                await run_beside(*beside)
            else:
                await run_beside(_until_unneeded(chain, settings, server), *beside)


async def _until_unneeded(chain: Chain, settings: RelaySettings, server: ShardServer) -> None:
    """Wait until the run is closed and nobody has fetched a chunk for long enough."""
    while True:
        idle_s = time.monotonic() - server.chunk_asked_at
        if idle_s >= settings.linger_s:
            try:
                if (await chain.read("RunRegistry", "closedAt", [settings.run]))[0]:
                    break
            except ChainError as error:
                logger.debug("chain does not answer", extra={"error": str(error)})
        await asyncio.sleep(max(LOOK_S, settings.linger_s - idle_s))
    logger.info("run complete", extra={"run_id": settings.run})


async def chain_trust(chain: Chain, run_id: int) -> Trust:
    """Return a function that reads a version's root from the chain; raises ConfigError without the
    run.

    Only the run's trainer of that moment could write the root, and later the run may have another
    trainer: so no signature is needed.
    """
    from muster.shardcast import TrustedRoot

    try:
        trainer = (await chain.runs.config_of(RunId(run_id))).trainer
    except ContractRevert:
        trainer = ZERO_ADDRESS
    if trainer == ZERO_ADDRESS:
        raise ConfigError(f"run {run_id} does not exist", hint="check --run, and --rpc")
    domain = chain.domain("RunRegistry")

    async def trust(run: RunId, version: PolicyVersion) -> TrustedRoot | None:
        try:
            root = (await chain.runs.checkpoint_of(run, version)).manifest_root
        except ContractRevert:
            return None
        return None if root == NO_ROOT else TrustedRoot(root, None, domain)

    return trust


# The work whose files are kept for judges


class NamedWork:
    """Work with a bond on chain: unjudged work that its worker committed directly, and work of open
    cases.
    """

    def __init__(self, view: ChainView, run_id: RunId, domain: Domain) -> None:
        self._view = view
        self._run_id = run_id
        self._domain = domain
        self._named: dict[Hash32, tuple[Submission, BatchView]] = {}
        self._workers: dict[Hash32, Address] = {}
        """Whose work a file is."""
        self._deadlines: dict[Hash32, int] = {}

    async def on_change(self, _events: list[Event]) -> None:
        """Update the list from the chain."""
        named = {
            batch.direct.leaf(): (batch.direct, batch)
            for batch in self._view.batches.values()
            if batch.direct is not None
            and batch.run_id == self._run_id
            and batch.status is not BatchStatus.JUDGED
            and not batch.is_void
        }
        for case in self._view.cases.values():
            if case.run_id == self._run_id and not case.closed:
                for claim in case.claims:
                    work = (claim.submission, self._view.batches[case.batch_id])
                    named[claim.submission.leaf()] = work
        self._named = named
        # Of several who name a file, all but the first may want to have it counted as theirs.
        oldest_last = sorted(named.values(), key=lambda each: -each[1].first_id)
        self._workers = {work.file_hash: work.worker for work, _ in oldest_last}
        self._deadlines = {leaf: at for leaf, at in self._deadlines.items() if leaf in named}

    def worker_of_file(self, name: Hash32) -> Address | None:
        """Return whose work with a bond a file belongs to, if any."""
        return self._workers.get(name)

    def worker_of_work(self, leaf: Hash32) -> Address | None:
        """Return whose work this is, if it has a bond."""
        return self._named[leaf][0].worker if leaf in self._named else None

    def work_fault(self, leaf: Hash32, document: bytes) -> str | None:
        """Return why a document does not prove that work, or None. Without this check an attacker
        could store false proofs first, and judges would not get the right ones.
        """
        from muster.api import BatchEntry
        from muster.client.tickets import slot_and_policy

        submission, batch = self._named[leaf]
        try:
            entry = BatchEntry.model_validate_json(document)
        except ValidationError:
            return "it does not parse"
        if entry.submission.leaf() != leaf:
            return "it is another submission"
        if entry.ticket is None or entry.ticket_signature is None:
            return "there is no ticket"
        if signer_of(self._domain, entry.ticket, entry.ticket_signature) != batch.orchestrator:
            return "the ticket is not the run's orchestrator's"
        if slot_and_policy(entry.ticket) != slot_and_policy(submission):
            return "the ticket is for another slot or policy"
        signer = signer_of(self._domain, submission, entry.signature)
        if signer is None:
            return "its signature is malformed"
        worker = self._view.workers.get(submission.worker)
        if worker is None or signer not in {node for _, node in worker.nodes}:
            return "it is not signed by the worker's node"
        if entry.ticket.deadline < self._deadlines.get(leaf, 0):
            # A slot may have had several tickets; an earlier deadline must not make the work late.
            return "it is here with a ticket of a later deadline"
        self._deadlines[leaf] = entry.ticket.deadline
        return None


# Shared by all servers of chunks: token, limits per address, announcement.


def limits_of(
    connections_per_address: int, requests_per_s: float, trusted_proxies: str = ""
) -> ServerLimits:
    """Return the limits per network address; bursts may be twice the rate."""
    from muster.shardcast import ServerLimits

    return ServerLimits(
        connections_per_address=connections_per_address,
        requests_per_s=requests_per_s,
        burst=int(2 * requests_per_s) + 1,
        proxies=Proxies(trusted_proxies),
    )


def read_token(file: Path | None) -> str | None:
    """Return the bearer token in a file, None without a file; raises ConfigError."""
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {file}: {error.strerror}") from error
    if not token:
        raise ConfigError(f"the token file {file} is empty")
    return token


def announce(server: ShardServer, name: str, ready_file: Path | None) -> None:
    """Log a server's URL and write it to the ready file.

    `name` is "relay" or "origin".
    """
    click.echo(f"{name} listens at {server.url}", err=True)
    if ready_file is not None:
        write_durably(ready_file, server.url.encode())


# The command


@click.group()
def relay() -> None:
    """Mirror policy weights for others."""


@relay.command()
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--run", type=int, help="Run to mirror.")
@click.option("--upstream", multiple=True, help="URL of origin or relay; repeatable.")
@chain_options
@click.option("--store", type=FOLDER, help="Folder for chunks and manifests.")
@click.option("--keep", type=int, help="How many of the newest versions are kept.")
@click.option("--hold-s", type=float, help="Seconds that older ones stay. [while disputable]")
@click.option("--max-bytes", type=int, help="Most bytes of chunks.")
@click.option("--room-bytes", type=int, help="Most bytes of files for judges; 0 for none. [1 GiB]")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 for any free one.")
@click.option("--ready-file", type=FILE, help="Write the URL here once it listens.")
@click.option("--poll-s", type=float, help="Seconds between two polls of the chain.")
@click.option("--linger-s", type=float, help="Idle time until a closed run's relay ends. [1 day]")
@click.option("--keep-going", is_flag=True, default=None, help="Serve a closed run until stopped.")
@click.option("--token-file", type=FILE, help="Bearer token that clients must show.")
@click.option("--upstream-token-file", type=FILE, help="Bearer token that upstreams demand.")
@click.option("--connections-per-address", type=int, help="Most open connections per address.")
@click.option("--requests-per-s", type=float, help="Most requests per second and address.")
def run(config: Path | None, **flags: object) -> None:
    """Mirror a run until stopped, or until the run is closed and nobody fetches any more.

    Without --upstream it only serves its store, such as one written by `run create`.

    \b
    Example:
      muster relay run --run 1 --upstream http://origin:8800 --store ./relay --port 8700
    """
    settings = load_settings(RelaySettings, file=config, flags=flags, env_prefix="MUSTER_RELAY_")
    setup_logging("relay")
    run_until_stopped(lambda: serve_relay(settings))
