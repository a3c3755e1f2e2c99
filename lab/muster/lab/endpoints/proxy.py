"""An HTTP proxy in front of a chain's endpoint that lies, lags, refuses or fails on command.

    async with RpcProxy(anvil.rpc_url) as proxy:
        chain = await Chain.connect(proxy.url, deployment)
        with proxy.telling(without_logs("BatchCommitted")):      # changes what is asked or answered
            await reader.poll()
        with proxy.failing(refusing(429, retry_after=1)):        # replaces the whole HTTP answer
            await reader.poll()
        proxy.interrupt(reorganise, after=3)                     # between two requests of a poll
        await reader.poll()

A `Lie` changes the parameters or results of single calls; a `Failure` replaces an HTTP answer. Both
can be limited to some methods and to a number of times. `Weather` decides about each request
separately. `proxy.asked` counts the calls by method, `proxy.http_requests` the HTTP requests,
including failed ones.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

import aiohttp
from aiohttp import web

from muster.chain.abi import contract_abi

Failure = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Answers an HTTP request instead of the chain; None lets the chain answer after all."""
Change = Callable[[str, list[Any], Any], Any]
"""Returns the answer to a method with these parameters, given the true result."""

Interruption = Callable[[], Awaitable[None]]
"""An action between two requests, such as a reorganisation."""


class Lie:
    """Base class, which answers truthfully; subclasses lie."""

    def ask(self, method: str, params: list[Any]) -> list[Any]:  # noqa: ARG002
        """Return the parameters that the chain is asked with."""
        return params

    def answer(self, method: str, params: list[Any], result: Any) -> Any:  # noqa: ARG002
        """Return the result for the client."""
        return result

    def refuse(self, method: str, params: list[Any], result: Any) -> str | None:  # noqa: ARG002
        """Return the message of an error that takes the result's place, if one does."""
        return None


class Weather(Protocol):
    """Random behaviour of an endpoint."""

    def failure(self, calls: Sequence[Mapping[str, Any]]) -> Failure | None:
        """Return what happens to an HTTP request, if anything does."""

    def lies(self, head: int) -> list[Lie]:
        """Return the lies in an answer, given the chain's height."""


@dataclass
class Answering(Lie):
    """Changes results of some methods."""

    change: Change
    methods: Collection[str] = ()
    times: int | None = None

    def answer(self, method: str, params: list[Any], result: Any) -> Any:
        """Return the result as it is changed."""
        if (self.methods and method not in self.methods) or self.times == 0:
            return result
        if self.times is not None:
            self.times -= 1
        return self.change(method, params, result)


@dataclass
class Lagging(Lie):
    """Knows the chain only up to a block, like an endpoint that has fallen behind."""

    head: int

    def ask(self, method: str, params: list[Any]) -> list[Any]:
        """Return the parameters with the newest block that it knows."""
        if method == "eth_getLogs":
            query = dict(params[0])
            query["toBlock"] = hex(min(self.head, int(query["toBlock"], 16)))
            query["fromBlock"] = hex(min(self.head + 1, int(query["fromBlock"], 16)))
            return [query]
        return [hex(self.head) if p in ("latest", "pending") else p for p in params]

    def answer(self, method: str, params: list[Any], result: Any) -> Any:  # noqa: ARG002
        """Return None for results from a block that it does not know."""
        if method == "eth_blockNumber":
            return hex(self.head)
        number = isinstance(result, dict) and result.get("blockNumber", result.get("number"))
        return None if number and int(number, 16) > self.head else result


@dataclass
class _Rule:
    failure: Failure
    methods: frozenset[str]
    times: int | None

    def applies_to(self, methods: Collection[str]) -> bool:
        if self.times == 0 or (self.methods and not self.methods & set(methods)):
            return False
        if self.times is not None:
            self.times -= 1
        return True


class RpcProxy:
    """Listens on its own loopback port and forwards to `upstream`."""

    def __init__(self, upstream: str, weather: Weather | None = None, *, port: int = 0) -> None:
        """Port 0 takes any free one."""
        self._upstream = upstream
        self._weather = weather
        self._port = port
        self._sent: dict[str, str] = {}
        self._lies: list[Lie] = []
        self._rules: list[_Rule] = []
        self._interruption: tuple[int, Interruption, asyncio.Future[None]] | None = None
        self._passing = asyncio.Lock()
        self.asked: Counter[str] = Counter()
        self.http_requests = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/", self._serve)
        # A handler that never answers is cancelled when its client disconnects.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    @contextmanager
    def telling(self, lie: Lie) -> Iterator[Lie]:
        """Lie until the block ends; nested lies add up."""
        self._lies.append(lie)
        try:
            yield lie
        finally:
            self._lies.remove(lie)

    @contextmanager
    def failing(
        self, failure: Failure, *, methods: Collection[str] = (), times: int | None = None
    ) -> Iterator[None]:
        """Fail until the block ends, on requests that contain one of the methods."""
        rule = _Rule(failure, frozenset(methods), times)
        self._rules.append(rule)
        try:
            yield
        finally:
            self._rules.remove(rule)

    def interrupt(self, interruption: Interruption, *, after: int = 0) -> asyncio.Future[None]:
        """Run an action once, after `after` more requests.

        No request is in progress then. The returned future is done afterwards, or raises the
        action's error.
        """
        happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._interruption = self.http_requests + after, interruption, happened
        return happened

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self._interruption is not None and self.http_requests >= self._interruption[0]:
            (_, interruption, happened), self._interruption = self._interruption, None
            async with self._passing:
                try:
                    await interruption()
                except Exception as error:  # raised where the interruption is awaited
                    happened.set_exception(error)
                else:
                    happened.set_result(None)
        self.http_requests += 1
        asked = json.loads(await request.read())
        calls = asked if isinstance(asked, list) else [asked]
        self.asked.update(call["method"] for call in calls)
        for rule in self._rules:
            if rule.applies_to([call["method"] for call in calls]):
                failure: Failure | None = rule.failure
                break
        else:
            failure = self._weather.failure(calls) if self._weather is not None else None
        failed = None if failure is None else await failure(request)
        return failed if failed is not None else await self._true(asked)

    async def _true(self, asked: Any) -> web.StreamResponse:
        """Return the chain's answer, changed by lies."""
        calls = asked if isinstance(asked, list) else [asked]
        async with self._passing:
            answers = await self._pass_on(calls)
        return web.json_response(answers if isinstance(asked, list) else answers[0])

    async def _pass_on(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lies = list(self._lies)
        if self._weather is not None:
            lies += self._weather.lies(int(await self._ask("eth_blockNumber"), 16))
        sent = []
        for call in calls:
            params = call.get("params", [])
            for lie in lies:
                params = lie.ask(call["method"], params)
            sent.append({**call, "params": params})
        async with self._session.post(self._upstream, json=sent) as response:
            answers = await response.json(content_type=None)
        by_id = {answer["id"]: answer for answer in answers}
        for call in calls:
            if call["method"] == "eth_sendRawTransaction" and "result" in by_id[call["id"]]:
                self._sent[by_id[call["id"]]["result"]] = call["params"][0]
        return [_changed(lies, call, by_id[call["id"]]) for call in calls]

    async def _ask(self, method: str, *params: Any) -> Any:
        """Return the chain's own answer, None for an error."""
        asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        async with self._session.post(self._upstream, json=asked) as response:
            answer = await response.json(content_type=None)
        return answer.get("result")

    async def mine(self, *, base_fee_factor: float = 1.0) -> None:
        """Mine a block, before which the base fee rises."""
        async with self._passing:
            if base_fee_factor != 1.0:
                block = await self._ask("eth_getBlockByNumber", "latest", False)
                fee = int(int(block["baseFeePerGas"], 16) * base_fee_factor)
                await self._ask("anvil_setNextBlockBaseFeePerGas", hex(fee))
            await self._ask("evm_mine")

    async def reorganise(self, depth: int) -> None:
        """Replace the newest blocks by others with the same transactions, in the same order.

        The chain must mine only on command or for a transaction, see `Anvil.STILL_S`.
        """
        async with self._passing:
            head = int(await self._ask("eth_blockNumber"), 16)
            hashes: list[str] = []
            for number in range(max(1, head - depth + 1), head + 1):
                block = await self._ask("eth_getBlockByNumber", hex(number), False)
                hashes += block["transactions"]
            # A transaction of the pool that was mined meanwhile would leave a hole in the chain.
            await self._ask("evm_setIntervalMining", 0)
            await self._ask("anvil_reorg", depth, [])
            for tx_hash in hashes:
                await self._ask("eth_sendRawTransaction", self._sent[tx_hash])
            await self._ask("evm_mine")
            await self._ask("evm_setAutomine", True)


def _changed(
    lies: Sequence[Lie], call: Mapping[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    if "result" not in answer:
        return answer
    method, params, result = call["method"], call.get("params", []), answer["result"]
    for lie in lies:
        message = lie.refuse(method, params, result)
        if message is not None:
            error = {"code": -32005, "message": message}
            return {"jsonrpc": "2.0", "id": answer["id"], "error": error}
        result = lie.answer(method, params, result)
    return {**answer, "result": result}


# ------------------------------------------------------------------------------ lies


def saying(method: str, result: Any, *, times: int | None = None) -> Lie:
    """Answer a method with a fixed result."""
    return Answering(lambda _m, _p, _r: result, [method], times)


def changing_logs(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Lie:
    """Change each log, or leave it out where `change` returns None."""

    def changed(_method: str, _params: list[Any], logs: Any) -> Any:
        return [log for log in (change(dict(log)) for log in logs) if log is not None]

    return Answering(changed, ["eth_getLogs"])


def without_logs(contract: str = "", event: str = "") -> Lie:
    """Leave out the logs of an event; without names, all."""
    events = contract_abi(contract).events if contract else ()
    topics = {known.topic for known in events if known.name == event}
    return changing_logs(lambda log: None if not topics or log["topics"][0] in topics else log)


# -------------------------------------------------------------------------- failures


def refusing(status: int, body: str = "no", **headers: str) -> Failure:
    """Answer a status without JSON, as rate limiters and gateways do."""

    async def fail(_request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, text=body, headers=named)

    return fail


def sending(body: bytes) -> Failure:
    """Answer these bytes."""

    async def fail(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return fail


async def dropping(request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def breaking_off(request: web.Request) -> web.StreamResponse:
    """Promise a long answer, and close the connection in the middle of it."""
    response = web.StreamResponse(headers={"content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"jsonrpc": "2.0", "id"')
    assert request.transport is not None
    request.transport.abort()
    return response


async def staying_silent(_request: web.Request) -> web.StreamResponse:
    """Never answer; ends when the client disconnects."""
    await asyncio.Event().wait()
    raise AssertionError


async def trickling(request: web.Request) -> web.StreamResponse:
    """Answer a byte now and then, forever."""
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)
    return response


async def flooding(request: web.Request) -> web.StreamResponse:
    """Answer without end, as fast as it is read."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"result": "')
    with suppress(ConnectionError):
        while True:
            await response.write(b"0" * (1 << 20))
    return response
