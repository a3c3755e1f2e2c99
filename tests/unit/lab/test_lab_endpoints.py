"""The endpoint with public endpoints' faults: it shows each, and the client handles it."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from muster.chain.rpc import is_for_rate, rpc_error
from muster.lab.endpoints.faults import (
    PROFILES,
    RANGE_WORDS,
    RATE_WORDS,
    RESULT_WORDS,
    Faults,
    PublicEndpoint,
)
from muster.lab.endpoints.proxy import Lie, RpcProxy

NONE = Faults(rate=0, lost=0, late=0, lag=0, logless=0, pending=0)
LOGS = [{"blockNumber": hex(n), "logIndex": "0x0"} for n in range(90, 101)]


def told(lies: list[Lie], method: str, params: list[Any], result: Any) -> Any:
    for lie in lies:
        params = lie.ask(method, params)
        result = lie.answer(method, params, result)
    return result


def refused(lies: list[Lie], first: int, last: int, logs: int) -> str | None:
    query = [{"fromBlock": hex(first), "toBlock": hex(last)}]
    found = [lie.refuse("eth_getLogs", query, [{}] * logs) for lie in lies]
    return next((message for message in found if message), None)


def calls(count: int) -> list[dict[str, Any]]:
    return [{"method": "eth_chainId", "params": []}] * count


def test_nothing_goes_wrong_by_itself() -> None:
    endpoint = PublicEndpoint(NONE, 0)
    assert [endpoint.failure(calls(10)) for _ in range(100)] == [None] * 100
    lies = endpoint.lies(100)
    assert told(lies, "eth_getLogs", [{"fromBlock": "0x0", "toBlock": "0x64"}], LOGS) == LOGS
    assert endpoint.played.total() == 0


@pytest.mark.parametrize(("blocks", "is_refused"), [(500, False), (501, True)])
def test_ranges_have_a_longest(blocks: int, is_refused: bool) -> None:
    endpoint = PublicEndpoint(NONE, 0)
    assert (refused(endpoint.lies(1000), 1, blocks, 0) is not None) is is_refused
    assert endpoint.played["ranges refused"] == is_refused


@pytest.mark.parametrize(("logs", "is_refused"), [(10_000, False), (10_001, True)])
def test_answers_have_a_largest(logs: int, is_refused: bool) -> None:
    endpoint = PublicEndpoint(NONE, 0)
    assert (refused(endpoint.lies(1000), 1, 2, logs) is not None) is is_refused


@pytest.mark.parametrize(("size", "is_refused"), [(10, False), (11, True)])
def test_batches_have_a_largest(size: int, is_refused: bool) -> None:
    assert (PublicEndpoint(NONE, 0).failure(calls(size)) is not None) is is_refused


@pytest.mark.parametrize("name", ["rate", "lost", "late"])
def test_requests_fail_as_often_as_is_said(name: str) -> None:
    endpoint = PublicEndpoint(Faults(**{**_shares(NONE), name: 0.5}), 0)
    failed = sum(endpoint.failure(calls(1)) is not None for _ in range(1000))
    assert 400 < failed < 600
    assert endpoint.played.total() == failed


def _shares(faults: Faults) -> dict[str, float]:
    return {name: getattr(faults, name) for name in ("rate", "lost", "late", "lag", "logless")} | {
        "pending": faults.pending
    }


def test_node_that_lags_tells_a_chain_that_is_shorter() -> None:
    lies = PublicEndpoint(Faults(**{**_shares(NONE), "lag": 1.0}), 0).lies(100)
    head = int(told(lies, "eth_blockNumber", [], "0x64"), 16)
    assert 97 <= head < 100
    block = {"number": hex(100)}
    assert told(lies, "eth_getBlockByNumber", [hex(100), False], block) is None


def test_newest_logs_are_missing() -> None:
    lies = PublicEndpoint(Faults(**{**_shares(NONE), "logless": 1.0}), 0).lies(100)
    query = [{"fromBlock": "0x0", "toBlock": "0x64"}]
    assert told(lies, "eth_getLogs", query, LOGS) == LOGS[:-1]


def test_pending_transactions_are_not_counted() -> None:
    lies = PublicEndpoint(Faults(**{**_shares(NONE), "pending": 1.0}), 0).lies(100)
    asked = ["0xaa", "pending"]
    for lie in lies:
        asked = lie.ask("eth_getTransactionCount", asked)
    assert asked == ["0xaa", "latest"]


@pytest.mark.parametrize(("code", "message"), RATE_WORDS)
def test_its_rate_limits_are_known_for_what_they_are(code: int, message: str) -> None:
    assert is_for_rate(rpc_error("m", {"code": code, "message": message}))


@pytest.mark.parametrize("message", [*RANGE_WORDS, *RESULT_WORDS])
def test_its_other_limits_are_no_rate_limits(message: str) -> None:
    words = message.format(most=500)
    assert not is_for_rate(rpc_error("eth_getLogs", {"code": -32005, "message": words}))


async def test_same_seed_does_the_same() -> None:
    played = []
    for _ in range(2):
        endpoint = PublicEndpoint(PROFILES["public"], 7)
        for _ in range(500):
            endpoint.failure(calls(1))
            endpoint.lies(100)
        played.append(endpoint.played)
    assert played[0] == played[1]
    assert played[0].total() > 50


class Chain:
    """Answers like a chain that is reorganised, and records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[Any]]] = []

    async def serve(self, request: web.Request) -> web.Response:
        """Answer one request or a batch."""
        body = await request.json()
        answers = [self._answer(each) for each in (body if isinstance(body, list) else [body])]
        return web.json_response(answers if isinstance(body, list) else answers[0])

    def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        method, params = call["method"], call["params"]
        self.asked.append((method, params))
        results: dict[str, Any] = {
            "eth_blockNumber": "0x9",
            "eth_getBlockByNumber": {"transactions": [f"hash of {params[0] if params else ''}"]},
            "eth_sendRawTransaction": f"hash of {params[0] if params else ''}",
        }
        return {"jsonrpc": "2.0", "id": call["id"], "result": results.get(method)}


async def test_a_reorganisation_brings_the_same_transactions_back() -> None:
    chain, app = Chain(), web.Application()
    app.router.add_post("/", chain.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with RpcProxy(url) as proxy, aiohttp.ClientSession() as session:
            for number in range(6, 10):
                call = {"id": 1, "method": "eth_sendRawTransaction", "params": [hex(number)]}
                async with session.post(proxy.url, json=call) as answer:
                    assert (await answer.json())["result"] == f"hash of {hex(number)}"
            chain.asked.clear()
            await asyncio.wait_for(proxy.reorganise(2), 5)
        sent = [params for method, params in chain.asked if method == "eth_sendRawTransaction"]
        assert sent == [["0x8"], ["0x9"]]
        assert ("anvil_reorg", [2, []]) in chain.asked
    finally:
        await runner.cleanup()
