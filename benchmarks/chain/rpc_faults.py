"""The cost of each fault of an RPC endpoint: how long its clients make no progress.

    make bench-rpc-faults

A proxy with one fault stands in front of a real Anvil. For ten seconds one account makes deposits
and a follower reads the events, both through that proxy. The table shows the longest time without
progress of each, and the number of followed deposits. In the end every deposit must have been
followed exactly once.

Writes results/rpc_faults.json.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from benchmarks.report import machine, print_table, write

from muster.app.anvil import Anvil
from muster.chain import (
    Chain,
    ChainView,
    Deployment,
    Event,
    follow,
)
from muster.client.stake import take_from_faucet
from muster.deploy import DeployParameters, deploy_contracts
from muster.lab.endpoints.faults import RATE_WORDS, Faults, PublicEndpoint, play
from muster.lab.endpoints.proxy import (
    Failure,
    Lie,
    RpcProxy,
    Weather,
    breaking_off,
    dropping,
    refusing,
    saying,
    sending,
    without_logs,
)
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ChainError
from muster.protocol.ids import RunId

LASTS_S = 10.0
POLL_S = 0.1
KEY = Anvil.key(1)
PURSE = 10**24
RUN = RunId(1)
QUIET: dict[str, float] = dict.fromkeys(("rate", "lost", "late", "lag", "logless", "pending"), 0.0)
NEVER = 1e9


@dataclass
class Chance:
    """Fails a share of the requests, or lies to a share of them."""

    share: float
    how: Failure | None = None
    lie: Lie | None = None
    chance: Random = field(default_factory=lambda: Random(20))

    def failure(self, calls: Sequence[Mapping[str, Any]]) -> Failure | None:  # noqa: ARG002
        """Return the failure, now and then."""
        return self.how if self.how and self.chance.random() < self.share else None

    def lies(self, head: int) -> list[Lie]:  # noqa: ARG002
        """Return the lie, now and then."""
        return [self.lie] if self.lie and self.chance.random() < self.share else []


@dataclass
class Fault:
    """One fault of an endpoint."""

    weather: Weather | None = None
    faults: Faults | None = None
    """Played, with fees and reorganisations."""
    transport: str = "http"
    others: int = 0
    """Honest endpoints beside it."""
    drop_every_s: float | None = None


def of(**wrong: Any) -> Fault:
    """Return a fault of `muster.lab.endpoints.faults`."""
    faults = Faults(**{**QUIET, "fee_every_s": NEVER, "reorg_every_s": NEVER, **wrong})
    return Fault(PublicEndpoint(faults, 20), faults)


RATE = b'{"jsonrpc":"2.0","id":null,"error":{"code":%d,"message":"%s"}}'
FAULTS = {
    "none": Fault(),
    "429 with Retry-After: 1, a fifth": Fault(Chance(0.2, refusing(429, retry_after="1"))),
    "429 without, a fifth": Fault(Chance(0.2, refusing(429))),
    "rate refused in JSON, a fifth": Fault(
        Chance(0.2, sending(RATE % (RATE_WORDS[1][0], RATE_WORDS[1][1].encode())))
    ),
    "batches of 2 at most": of(most_calls=2),
    "no batches": of(most_calls=1),
    "half from nodes 1 to 3 blocks behind": of(lag=0.5),
    "half without the newest logs": of(logless=0.5),
    "answers after 5 s, a twentieth": of(late=0.05),
    "answers cut off, a tenth": Fault(Chance(0.1, breaking_off)),
    "connections dropped, a tenth": Fault(Chance(0.1, dropping)),
    "gateway errors, a tenth": Fault(Chance(0.1, refusing(502, "<html>"))),
    "`pending` nonces without what is pending": of(pending=1.0),
    "the base fee triples every 2 s": of(fee_every_s=2.0),
    "1 to 20 blocks taken back every 3 s": of(reorg_every_s=3.0),
    "WebSocket dropped every 2 s": Fault(transport="ws", drop_every_s=2.0),
    "one of three leaves all logs out": Fault(Chance(1.0, lie=without_logs()), others=2),
    "one of three is on another chain": Fault(
        Chance(1.0, lie=saying("eth_chainId", "0x1")), others=2
    ),
    "one of two answers nothing": Fault(Chance(1.0, dropping), others=1),
}


@dataclass
class Seen:
    """Measurements under one fault."""

    sent: int
    followed: int
    sender_still_s: float
    """Longest time between two deposits that were mined."""
    follower_still_s: float
    """Longest time between two that were followed."""


async def main() -> None:
    """Play all faults, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only faults with WORD in their name"
    )
    asked = parser.parse_args()
    found = {}
    for name, fault in FAULTS.items():
        if asked.only in name:
            found[name] = await watch(fault)
            print(f"{name}: {found[name]}", flush=True)
    rows = [
        (name, str(s.followed), f"{s.sender_still_s:.1f}", f"{s.follower_still_s:.1f}")
        for name, s in found.items()
    ]
    header = ("fault", "deposits", "sender stood still, s", "follower, s")
    print_table(f"Faults of an RPC endpoint, {LASTS_S:g} s each", header, rows)
    if not asked.only:
        longest = max(seen.follower_still_s for seen in found.values())
        detail = {name: asdict(seen) for name, seen in found.items()}
        write("rpc_faults", {"rpc_fault_still_s": longest}, detail, measured_on=machine())


async def watch(fault: Fault) -> Seen:
    """Measure a sender and a follower behind an endpoint with a fault."""
    async with AsyncExitStack() as stack:
        block_s = Anvil.STILL_S if fault.faults else 1.0
        anvil = await stack.enter_async_context(Anvil(block_time_s=block_s))
        deployment = await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
        async with await Chain.connect(anvil.rpc_url, deployment, key=KEY) as chain:
            account = address_of(KEY)
            await take_from_faucet(chain, account, PURSE)
            await chain.token.approve(deployment.contracts["StakeVault"], PURSE)
            await chain.rpc.call("anvil_mine", hex(21))
        urls = [anvil.rpc_url] * fault.others
        if fault.drop_every_s is not None:
            urls = [await stack.enter_async_context(dropped(anvil, fault.drop_every_s))]
        else:
            proxy = await stack.enter_async_context(RpcProxy(anvil.rpc_url, fault.weather))
            urls = [proxy.url, *(f"{url}/?{n}" for n, url in enumerate(urls))]
        playing = None
        if fault.faults is not None and isinstance(fault.weather, PublicEndpoint):
            playing = asyncio.create_task(play(proxy, fault.weather, fault.faults))
        try:
            return await deposit_and_follow(urls, deployment)
        finally:
            if playing is not None:
                playing.cancel()
                await asyncio.wait([playing])


async def deposit_and_follow(urls: list[str], deployment: Deployment) -> Seen:
    """Make deposits while the fault lasts, and follow until all are seen."""
    view, sent, seen, began = ChainView(), list[float](), list[float](), time.monotonic()
    account = address_of(KEY)

    def deposits() -> int:
        return view.stake(RUN, account).active_wei

    async def note(_events: list[Event]) -> None:
        seen.append(time.monotonic())

    async with (
        await connected(urls, deployment) as chain,
        await connected(urls, deployment) as other,
    ):
        following = asyncio.create_task(follow(other, view, poll_s=POLL_S, on_change=note))
        while time.monotonic() - began < LASTS_S:
            with suppress(ChainError):
                await chain.once(f"deposit {len(sent)}").vault.deposit(RUN, account, 1)
                sent.append(time.monotonic())
            await asyncio.sleep(POLL_S)
        async with asyncio.timeout(60):
            while deposits() < len(sent):
                await asyncio.sleep(POLL_S)
        following.cancel()
        await asyncio.wait([following])
    assert deposits() == len(sent), f"{deposits()} deposits of {len(sent)}"
    return Seen(len(sent), deposits(), longest_gap(began, sent), longest_gap(began, seen))


async def connected(urls: list[str], deployment: Deployment) -> Chain:
    """Connect, whatever the endpoint does."""
    while True:
        with suppress(ChainError):
            return await Chain.connect(urls, deployment, key=KEY)


def longest_gap(began: float, times: Sequence[float]) -> float:
    """Return the longest gap between these times."""
    pairs = zip([began, *times], [*times, max([began + LASTS_S, *times])], strict=True)
    return max(after - before for before, after in pairs)


@asynccontextmanager
async def dropped(anvil: Anvil, every_s: float) -> AsyncIterator[str]:
    """Serve a WebSocket to the chain that is dropped now and then."""
    open_ones: set[asyncio.StreamWriter] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(anvil.rpc_url.rsplit(":", 1)[1])
        upstream, out = await asyncio.open_connection("127.0.0.1", port)
        open_ones.update((writer, out))
        await asyncio.gather(copy(reader, out), copy(upstream, writer))
        open_ones.difference_update((writer, out))

    async def drop() -> None:
        while True:
            await asyncio.sleep(every_s)
            for writer in open_ones:
                writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    dropping_ = asyncio.create_task(drop())
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        dropping_.cancel()
        await asyncio.wait([dropping_])
        server.close()


if __name__ == "__main__":
    asyncio.run(main())
