import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, strategies as st

from muster.chain.rpc import MAX_BATCH, SEND, HttpRefusal, Rpc, is_revert, mask_url, rpc_error
from muster.protocol.errors import ChainUnreachable, RpcError

Answer = Callable[[Any], Any]


def rpc_answering(answer: Answer) -> Rpc:
    """An endpoint whose answer is a function of the request."""

    async def post(body: bytes) -> bytes:
        return json.dumps(answer(json.loads(body))).encode()

    return Rpc("http://node", post=post)


def echo(request: Any) -> Any:
    if isinstance(request, list):
        return [echo(one) for one in request]
    return {"jsonrpc": "2.0", "id": request["id"], "result": request["params"]}


# ----------------------------------------------------------------------- masking


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("http://127.0.0.1:8545", "http://127.0.0.1:8545"),
        ("https://user:secret@rpc.example/v2/key?token=x#y", "https://rpc.example/…"),
        ("https://rpc.example?apikey=secret", "https://rpc.example"),
        ("http://[::1]:8545/", "http://[::1]:8545"),
        ("secret", "?://?/…"),
        ("http://host:secretport/", "?"),
    ],
)
def test_url_is_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@given(st.text(st.characters(categories=["L", "N"]), min_size=6, max_size=20))
def test_secret_parts_never_show(secret: str) -> None:
    masked = mask_url(f"https://u:{secret}@host.example/{secret}?k={secret}")
    assert masked == "https://host.example/…"


# ------------------------------------------------------------------------- calls


async def test_call_sends_method_and_parameters() -> None:
    seen: list[Any] = []

    def answer(request: Any) -> Any:
        seen.append(request)
        return echo(request)

    assert await rpc_answering(answer).call("eth_x", 1, "a") == [1, "a"]
    assert seen[0]["method"] == "eth_x"
    assert seen[0]["jsonrpc"] == "2.0"


async def test_null_result_is_a_result() -> None:
    assert await rpc_answering(lambda r: {"id": r["id"], "result": None}).call("eth_x") is None


@pytest.mark.parametrize("answer", [[], "x", 5, None, {}, {"id": 1}])
async def test_answer_that_is_not_json_rpc_is_named(answer: Any) -> None:
    with pytest.raises(ChainUnreachable, match="does not speak JSON-RPC"):
        await rpc_answering(lambda _r: answer).call("eth_x")


async def test_answer_that_is_not_json_is_named() -> None:
    async def post(_body: bytes) -> bytes:
        return b"<html>"

    with pytest.raises(ChainUnreachable, match="not JSON"):
        await Rpc("http://node", post=post).call("eth_x")


async def test_error_carries_code_and_data() -> None:
    error = {"code": 3, "message": "execution reverted", "data": "0x12345678"}
    with pytest.raises(RpcError, match="eth_x failed: execution reverted") as caught:
        await rpc_answering(lambda r: {"id": r["id"], "error": error}).call("eth_x")
    assert (caught.value.code, caught.value.data) == (3, bytes.fromhex("12345678"))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("0x0102", b"\1\2"),
        ("Reverted 0x0102", b"\1\2"),
        ({"data": "0x0102"}, b"\1\2"),
        ({"result": "0x0102"}, b"\1\2"),
        (None, b""),
        ("no hexadecimal", b""),
        ([1], b""),
        ({}, b""),
    ],
)
def test_revert_bytes_are_found_wherever_endpoints_put_them(data: Any, expected: bytes) -> None:
    assert rpc_error("eth_call", {"code": -32000, "message": "m", "data": data}).data == expected


@pytest.mark.parametrize("error", ["text", 5, [], {}, {"code": "x"}, {"message": None}])
def test_malformed_errors_are_errors_still(error: Any) -> None:
    assert isinstance(rpc_error("eth_x", error), RpcError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RpcError("m", code=3), True),
        (RpcError("execution reverted: x", code=-32000), True),
        (RpcError("m", code=-32000, data=b"\1"), True),
        (RpcError("nonce too low", code=-32000), False),
    ],
)
def test_reverts_are_recognised(error: RpcError, expected: bool) -> None:
    assert is_revert(error) is expected


@pytest.mark.parametrize(
    "lost",
    [
        ConnectionResetError(),
        ConnectionAbortedError(),
        HttpRefusal("502", status=502, retry_after=None, hint=""),
    ],
)
@pytest.mark.parametrize(("method", "is_repeated"), [("eth_sendRawTransaction", 0), ("eth_x", 1)])
async def test_request_whose_answer_was_lost_is_repeated_unless_it_is_a_transaction(
    monkeypatch: pytest.MonkeyPatch, lost: Exception, method: str, is_repeated: bool
) -> None:
    monkeypatch.setattr("muster.chain.rpc._PAUSE_S", (0.0, 0.0))
    failures, asked = [lost], list[bytes]()

    async def post(body: bytes) -> bytes:
        asked.append(body)
        if failures:
            raise failures.pop()
        # A node that took the first one, or another one behind the same address.
        return json.dumps({"id": json.loads(body)["id"], "error": {"message": "full"}}).encode()

    with pytest.raises(RpcError if is_repeated else ChainUnreachable):
        await Rpc("http://node", post=post).call(method, "0x02")
    assert len(asked) == 1 + is_repeated


# ----------------------------------------------------------------------- batches


async def test_batch_returns_results_in_the_order_asked() -> None:
    rpc = rpc_answering(lambda requests: list(reversed(echo(requests))))
    assert await rpc.batch([("a", [1]), ("b", [2]), ("c", [3])]) == [[1], [2], [3]]


async def test_large_batch_is_split() -> None:
    sizes: list[int] = []

    def answer(requests: Any) -> Any:
        sizes.append(len(requests) if isinstance(requests, list) else 1)
        return echo(requests)

    calls: list[tuple[str, list[Any]]] = [("m", [i]) for i in range(2 * MAX_BATCH + 1)]
    assert await rpc_answering(answer).batch(calls) == [[i] for i in range(len(calls))]
    assert sizes == [MAX_BATCH, MAX_BATCH, 1]


async def test_empty_batch_asks_nothing() -> None:
    assert await rpc_answering(lambda _r: 1 / 0).batch([]) == []


def one_failing(requests: Any) -> Any:
    answers = echo(requests)
    answers[1] = {"id": requests[1]["id"], "error": {"code": -1, "message": "no"}}
    return answers


async def test_batch_raises_the_error_of_one_call() -> None:
    with pytest.raises(RpcError, match="b failed: no"):
        await rpc_answering(one_failing).batch([("a", []), ("b", []), ("c", [])])


async def test_try_batch_puts_errors_in_their_places() -> None:
    first, second, third = await rpc_answering(one_failing).try_batch(
        [("a", [1]), ("b", []), ("c", [3])]
    )
    assert (first, third) == ([1], [3])
    assert isinstance(second, RpcError)


async def test_missing_answer_in_a_batch_is_named() -> None:
    with pytest.raises(ChainUnreachable, match="no answer to b"):
        await rpc_answering(lambda r: echo(r)[:1]).batch([("a", []), ("b", [])])


async def test_endpoint_that_refuses_batches_says_so() -> None:
    refusal = {"id": None, "error": {"code": -32600, "message": "batches are not supported"}}
    with pytest.raises(RpcError, match="batches are not supported"):
        await rpc_answering(lambda _r: refusal).batch([("a", [])])


# --------------------------------------------------------------------- transport


async def test_silent_endpoint_is_given_up_after_the_deadline() -> None:
    async def post(_body: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    rpc = Rpc("http://node", timeout_s=0.01, post=post)
    with pytest.raises(ChainUnreachable, match=r"http://node did not answer within 0\.01 s"):
        await rpc.call("eth_x")


class Flaky:
    """Fails with the given errors, then echoes."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self, body: bytes) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return json.dumps(echo(json.loads(body))).encode()


@pytest.mark.parametrize(
    "error", [aiohttp.ServerDisconnectedError(), ConnectionResetError(), BrokenPipeError()]
)
async def test_lost_answer_is_asked_for_again_for_a_while(error: Exception) -> None:
    for lost in (1, 4):
        assert await Rpc("http://node", post=Flaky(*[error] * lost)).call("eth_x", 1) == [1]
    with pytest.raises(ChainUnreachable):
        await Rpc("http://node", timeout_s=0.1, post=Flaky(*[error] * 50)).call("eth_x", 1)


@pytest.mark.parametrize(
    "error",
    [OSError("http://user:secret@node"), aiohttp.ClientError("secret"), ConnectionRefusedError()],
)
async def test_failures_name_the_endpoint_without_secrets(error: Exception) -> None:
    rpc = Rpc("http://user:secret@node/key", post=Flaky(error))
    with pytest.raises(ChainUnreachable, match="http://node/… does not answer") as caught:
        await rpc.call("eth_x")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("scheme", ["http", "ws"])
@pytest.mark.parametrize("values", [["x"] * 40, [[]] * 20, [{}] * 20, [[[[]]]] * 10])
@pytest.mark.parametrize("most", [35, 60])
async def test_answer_of_more_values_than_memory_may_hold_is_refused_unparsed(
    monkeypatch: pytest.MonkeyPatch, scheme: str, values: list[Any], most: int
) -> None:
    monkeypatch.setattr("muster.chain.providers.MAX_ANSWER_VALUES", most)
    answer = {"jsonrpc": "2.0", "id": 0, "result": values}

    async def over_http(_request: web.Request) -> web.Response:
        return web.json_response(answer)

    async def over_socket(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await socket.send_json(answer)
        return socket

    runner, url = await serve(over_http if scheme == "http" else over_socket)
    async with Rpc(url.replace("http", scheme), timeout_s=0.2) as rpc:
        if most == 60:
            assert await rpc.call("eth_x") == values
        else:
            with pytest.raises(ChainUnreachable):
                await rpc.call("eth_x")
    await runner.cleanup()


NO_ANSWERS = (
    *("7", "[]", "null", '{"id": []}', '{"id": {}}', '{"id": 99}', '{"id": 99, "error": {}}'),
    *(f'{{"method": "eth_subscription", "params": {params}}}' for params in ("7", "{}", "[]")),
    '{"method": "eth_subscription", "params": {"subscription": []}}',
    '{"error": {}, "params": {"subscription": "0x1"}}',
)
NO_JSON = ("", "{", "x", "[" * 2000 + "]" * 2000, "9" * 5000)


@pytest.mark.parametrize("message", [*NO_ANSWERS, *NO_JSON])
async def test_socket_that_says_anything_else_is_unreachable_at_most(message: str) -> None:
    messages = [message]

    async def handler(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for asked in socket:
            for each in [*messages, json.dumps(echo(asked.json()))]:
                await socket.send_str(each)
        return socket

    runner, url = await serve(handler)
    async with Rpc(url.replace("http", "ws"), timeout_s=2.0) as rpc:
        if message in NO_ANSWERS:
            assert await rpc.call("eth_x", 1) == [1]
        else:
            with pytest.raises(ChainUnreachable):
                await rpc.call(SEND, 1)
        messages.clear()
        assert await rpc.call("eth_x", 2) == [2]
    await runner.cleanup()


async def serve(handler: Callable[[web.Request], Any]) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_route("*", "/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/"


async def test_http_endpoint_is_spoken_to() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(echo(await request.json()))

    runner, url = await serve(handler)
    async with Rpc(url) as rpc:
        assert await rpc.call("eth_x", 1) == [1]
        assert await rpc.batch([("a", [2])]) == [[2]]
    await runner.cleanup()


async def test_json_rpc_error_in_an_http_error_is_read() -> None:
    async def handler(request: web.Request) -> web.Response:
        error = {"code": -5, "message": "no"}
        return web.json_response({"id": (await request.json())["id"], "error": error}, status=400)

    runner, url = await serve(handler)
    async with Rpc(url) as rpc:
        with pytest.raises(RpcError, match="no"):
            await rpc.call("eth_x")
    await runner.cleanup()


async def test_an_orchestrator_is_no_chain_endpoint_although_it_answers_json() -> None:
    async def handler(_request: web.Request) -> web.Response:
        error = {"code": "http_405", "message": "Method Not Allowed", "hint": None}
        return web.json_response({"error": error}, status=405)

    runner, url = await serve(handler)
    async with Rpc(url) as rpc:
        with pytest.raises(ChainUnreachable, match="answers HTTP 405: it is no chain's") as caught:
            await rpc.call("eth_chainId")
    assert "--rpc" in (caught.value.hint or "")
    await runner.cleanup()


@pytest.mark.parametrize("status", [404, 429, 502])
async def test_http_error_without_json_is_named(status: int) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=status, text="nope")

    runner, url = await serve(handler)
    async with Rpc(url) as rpc:
        with pytest.raises(ChainUnreachable, match=f"answers HTTP {status}"):
            await rpc.call("eth_x")
    await runner.cleanup()
