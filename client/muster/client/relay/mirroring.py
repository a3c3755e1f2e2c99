"""A relay's process: mirrors a run's policy weights for others, and shows what judges need.

Wires the chain (which roots are true, who trains, which work has a bond behind it) to the mirror,
the room and the server of `muster.shardcast`. A relay is trusted for nothing: whoever fetches
checks every byte.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from muster.chain import ZERO_ADDRESS, Chain, ChainView, follow
from muster.client.relay.named_work import NamedWork
from muster.client.relay.serving import announce, limits_of, read_token
from muster.lifecycle import run_beside
from muster.protocol.errors import ChainError, ConfigError, ContractRevert
from muster.protocol.ids import PolicyVersion, RunId
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Settings

if TYPE_CHECKING:
    from muster.shardcast import ShardServer, Trust


logger = logging.getLogger(__name__)

LOOK_S = 15.0
"""Pause between two looks whether the run was closed."""
NO_ROOT = bytes(32)
"""What the chain holds for a version that was never published."""


class RelaySettings(Settings):
    """How one relay mirrors one run."""

    run: Annotated[int, Field(ge=1)]
    """The run it mirrors."""
    upstream: Annotated[tuple[str, ...], Field(min_length=1)]
    """URLs of the origin or of other relays."""
    rpc: str = DEFAULT_RPC
    """JSON-RPC endpoint of the chain."""
    deployments: Path = DEPLOYMENTS
    """Folder of deployment files, one per chain id."""
    store: Path = Path("relay")
    """Folder for chunks and manifests."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 5
    """Newest versions that stay."""
    max_bytes: Annotated[int, Field(ge=1)] | None = None
    """Most bytes of chunks; older versions make room, and one that alone exceeds it is refused."""
    room_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes of submissions' files for judges of the network; 0 for no room."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    """Port to listen on; 0 for any free one."""
    ready_file: Path | None = None
    """File that receives the URL once the process listens."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 0.2
    """Least time between two looks at an upstream, or at the chain for one version."""
    linger_s: Annotated[float, Field(ge=0, le=31_536_000)] = 86_400.0
    """How long after the run was closed nobody may have fetched anything before it ends."""
    keep_going: bool = False
    """Serve a closed run until stopped."""
    token_file: Path | None = None
    """File with the bearer token that clients must show; none without it."""
    upstream_token_file: Path | None = None
    """File with the bearer token that the upstreams demand."""
    connections_per_address: Annotated[int, Field(ge=1)] = 128
    """Most open connections from one network address."""
    requests_per_s: Annotated[float, Field(gt=0)] = 500.0
    """Requests per second from one network address, sustained; bursts may be twice that."""


async def serve_relay(settings: RelaySettings) -> None:
    """Mirror and serve until cancelled, or until the run is closed and nobody has fetched for
    `linger_s`; raises ConfigError or ChainError when it cannot start.
    """
    from muster.shardcast import ChunkStore, Relay, Room, ShardServer
    from muster.shardcast.metrics import ShardMetrics

    store = ChunkStore(settings.store, keep=settings.keep, max_bytes=settings.max_bytes)
    async with await Chain.connect(settings.rpc, settings.deployments) as chain:
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
        limits = limits_of(settings.connections_per_address, settings.requests_per_s)
        await mirror.recheck()
        view, room = ChainView(), None
        guard = NamedWork(view, RunId(settings.run), chain.domain("ContributionLedger"))
        if settings.room_bytes:
            room = Room(settings.store / "room", max_bytes=settings.room_bytes, admission=guard)
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
    """Return once the run is closed and nobody has asked for a chunk for long enough."""
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
    """Return what asks the chain for a version's root; the run's trainer never changes."""
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
        return None if root == NO_ROOT else TrustedRoot(root, trainer, domain)

    return trust
