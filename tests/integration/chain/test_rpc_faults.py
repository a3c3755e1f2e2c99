"""An RPC endpoint that lies, lags, refuses or breaks: each has its outcome, and none ends a reader.

Every fault goes over HTTP: the proxy stands between the reader and a real chain.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from chain_scenario import HONEST, ORCHESTRATOR, OWNER, Scenario, network, play

from muster.chain import Chain, ChainView, EventReader, apply_poll
from muster.client.cli.trap import anchor_plan, find_anchor
from muster.lab.endpoints.faults import Faults, PublicEndpoint
from muster.lab.endpoints.proxy import (
    Answering,
    Failure,
    Lagging,
    Lie,
    RpcProxy,
    breaking_off,
    changing_logs,
    dropping,
    flooding,
    refusing,
    saying,
    sending,
    staying_silent,
    trickling,
    without_logs,
)
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import (
    ChainError,
    ChainInconsistent,
    ChainUnreachable,
    RpcError,
    WrongChain,
)
from muster.protocol.ids import Hash32, RunId, Step
from muster.protocol.traps import TrapPlan


@asynccontextmanager
async def behind_proxy() -> AsyncIterator[tuple[Scenario, RpcProxy, Chain]]:
    """A chain with a judged batch, and a connection to it whose endpoint can be made to fail."""
    async with (
        network() as net,
        RpcProxy(net.anvil.rpc_url) as proxy,
        await Chain.connect(proxy.url, net.deployment, timeout_s=0.5) as chain,
    ):
        await play(net)
        yield net, proxy, chain


async def view_of(chain: Chain) -> ChainView:
    view = ChainView()
    apply_poll(view, await EventReader(chain).poll())
    return view


FAILURES: dict[str, tuple[Failure, type[Exception], str]] = {
    "limits the rate": (refusing(429, retry_after="1"), ChainUnreachable, "answers HTTP 429"),
    "is overloaded": (refusing(503), ChainUnreachable, "answers HTTP 503"),
    "is a gateway": (refusing(502, "<html>"), ChainUnreachable, "answers HTTP 502"),
    "drops the connection": (dropping, ChainUnreachable, "does not answer: ServerDisconnected"),
    "breaks off": (breaking_off, ChainUnreachable, "does not answer: ClientPayloadError"),
    "never answers": (staying_silent, ChainUnreachable, "did not answer within 0.5 s"),
    "trickles": (trickling, ChainUnreachable, "did not answer within 0.5 s"),
    "floods": (flooding, ChainUnreachable, "answers more than"),
    "is a web page": (sending(b"<html>"), ChainUnreachable, "not JSON"),
    "answers nothing": (sending(b""), ChainUnreachable, "not JSON"),
    "answers bytes": (sending(bytes(range(256))), ChainUnreachable, "not JSON"),
    "nests": (sending(b"[" * 200_000), ChainUnreachable, "not JSON"),
    "answers null": (sending(b"null"), ChainUnreachable, "does not speak JSON-RPC"),
    "answers a number": (sending(b"1e999"), ChainUnreachable, "does not speak JSON-RPC"),
    "answers ids of its own": (
        sending(b'[{"id": [], "result": 1}, {"id": 7777, "result": 1}]'),
        ChainUnreachable,
        "not a JSON object",
    ),
    "limits the rate in JSON": (
        sending(b'{"error": {"code": -32005, "message": "limit exceeded"}}'),
        RpcError,
        "limit exceeded",
    ),
}


async def test_every_failure_has_its_outcome_and_reading_goes_on_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.chain.providers.MAX_ANSWER_BYTES", 4 << 20)
    async with behind_proxy() as (net, proxy, chain):
        reader, view = EventReader(chain), ChainView()
        for name, (failure, error, message) in FAILURES.items():
            with proxy.failing(failure), pytest.raises(error, match=message) as caught:
                await reader.poll()
            assert net.anvil.rpc_url not in str(caught.value), name
        apply_poll(view, await reader.poll())
        assert view.batches == (await view_of(net.of(OWNER))).batches != {}


def of_block(block: int, **changes: Any) -> Lie:
    """Change the logs of a block; without changes, leave them out."""

    def change(log: dict[str, Any]) -> dict[str, Any] | None:
        if log["blockNumber"] != hex(block):
            return log
        return log | changes if changes else None

    return changing_logs(change)


LIES: dict[str, tuple[Callable[[int], Lie], type[ChainError], str]] = {
    "leaves all logs out": (lambda _: without_logs(), ChainInconsistent, "were left out"),
    "leaves a block's logs out": (of_block, ChainInconsistent, "were left out"),
    "has other block hashes": (
        lambda block: of_block(block, blockHash="0x" + "66" * 32),
        ChainInconsistent,
        "of another block",
    ),
    "has another time": (
        lambda block: of_block(block, blockTimestamp="0x1"), ChainInconsistent, "another time"
    ),
    "has damaged data": (
        lambda block: of_block(block, data="0x12"), ChainUnreachable, "malformed log"
    ),
    "answers no logs": (
        lambda _: saying("eth_getLogs", None), ChainUnreachable, "no list of logs"
    ),
    "has no head": (
        lambda _: saying("eth_getBlockByNumber", None), ChainUnreachable, "no latest block"
    ),
    "has a head of words": (
        lambda _: saying("eth_getBlockByNumber", {"number": "many"}), ChainUnreachable, "nonsense"
    ),
}  # fmt: skip


async def test_every_lie_has_its_outcome_and_reading_goes_on_after_it() -> None:
    async with behind_proxy() as (net, proxy, chain):
        true = await view_of(net.of(OWNER))
        last = max(block.number for block in true.recent_blocks())
        for name, (lie, error, message) in LIES.items():
            reader, view = EventReader(chain), ChainView()
            with proxy.telling(lie(last)), pytest.raises(error, match=message):
                await reader.poll()
            apply_poll(view, await reader.poll())
            assert view.recent_blocks() == true.recent_blocks(), name


async def test_endpoint_that_lags_or_serves_another_chain_takes_nothing_back() -> None:
    async with behind_proxy() as (net, proxy, chain):
        reader = EventReader(chain)
        await reader.poll()
        head = await net.of(OWNER).block_number()
        with proxy.telling(Lagging(head - 3)), pytest.raises(ChainInconsistent, match="before"):
            await reader.poll()
        other_chain = Answering(
            lambda method, _p, result: "0x1" if method == "eth_chainId" else _elsewhere(result)
        )
        with proxy.telling(other_chain), pytest.raises(WrongChain, match="answers for chain 1"):
            await reader.poll()
        await net.commit([net.submission(HONEST, 9)])
        poll = await reader.poll()
        assert (poll.rewound_to, poll.events[0].name) == (None, "BatchCommitted")


def _elsewhere(result: Any) -> Any:
    if not isinstance(result, dict) or "hash" not in result:
        return result
    return result | {"hash": hex0x(keccak(result["hash"].encode()))}


async def test_commitment_of_a_trap_plan_is_found_where_ranges_of_logs_are_limited() -> None:
    plan = TrapPlan(RunId(1), HONEST.address, Step(0), Step(9), 1, Hash32(bytes(32)))
    faults = Faults(rate=0, lost=0, late=0, lag=0, logless=0, pending=0, most_blocks=20)
    weather = PublicEndpoint(faults, 0)
    async with network() as net, RpcProxy(net.anvil.rpc_url, weather) as proxy:
        await anchor_plan(net.of(OWNER), plan)
        await net.rpc.call("anvil_mine", hex(100))
        async with await Chain.connect(proxy.url, net.deployment) as chain:
            found = await find_anchor(chain, plan)
    assert found is not None
    assert found.by == OWNER.address
    assert weather.played["ranges refused"] > 0


async def test_connecting_to_the_wrong_chain_is_refused() -> None:
    async with network(with_run=False) as net, RpcProxy(net.anvil.rpc_url) as proxy:
        for lie, error in (
            (saying("eth_chainId", "0x1"), WrongChain),
            (saying("eth_getCode", "0x"), WrongChain),
            (saying("eth_getCode", None), WrongChain),
            (saying("eth_chainId", "one"), ChainUnreachable),
            (saying("eth_chainId", None), ChainUnreachable),
        ):
            with proxy.telling(lie), pytest.raises(error):
                await Chain.connect(proxy.url, net.deployment)


async def test_transaction_happens_once_however_the_endpoint_fails() -> None:
    async with behind_proxy() as (net, proxy, _):
        before = len((await view_of(net.of(OWNER))).batches)
        async with await Chain.connect(
            proxy.url, net.deployment, key=ORCHESTRATOR.key, timeout_s=0.5
        ) as chain:
            failures = (dropping, breaking_off, staying_silent, refusing(429), sending(b"{}"))
            for number, failure in enumerate(failures, start=20):
                root = net.submission(HONEST, number).leaf()
                named = chain.once(f"batch {number}")
                # It is sent and arrives; the answer is lost.
                with proxy.failing(failure, methods=["eth_getTransactionReceipt"], times=2):
                    await named.ledger.commit_batch(net.run_id, root, 1, 10)
                with proxy.failing(failure, methods=["eth_estimateGas"], times=2):
                    await named.ledger.commit_batch(net.run_id, root, 1, 10)
        assert len((await view_of(net.of(OWNER))).batches) == before + len(failures)
