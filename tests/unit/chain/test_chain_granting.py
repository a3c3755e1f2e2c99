"""Endpoints' refusals in their own words: requests are repeated later, or in smaller parts."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from muster.chain import rpc as rpc_module
from muster.chain.rpc import HttpRefusal, Portion, Rpc
from muster.protocol.errors import ChainUnreachable, RpcError

Post = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_module, "_PAUSE_S", (0.001, 0.002))


def rpc_of(answer: Post, *, timeout_s: float = 1.0) -> Rpc:
    async def post(body: bytes) -> bytes:
        return json.dumps(answer(json.loads(body))).encode()

    return Rpc("http://node", timeout_s=timeout_s, post=post)


def echo(request: Any) -> Any:
    if isinstance(request, list):
        return [echo(each) for each in request]
    return {"id": request["id"], "result": request["params"][0]}


def error(request: Any, message: str, code: int = -32005, data: str = "") -> Any:
    return {"id": request["id"], "error": {"code": code, "message": message, "data": data}}


def refusal(status: int, retry_after: str | None = None) -> HttpRefusal:
    return HttpRefusal(f"answers HTTP {status}", status=status, retry_after=retry_after, hint="x")


def refusing(times: int, how: Post, answer: Post = echo) -> Post:
    """Refuse the first `times` requests, then answer."""
    left = [times]

    def answering(request: Any) -> Any:
        if not left[0]:
            return answer(request)
        left[0] -= 1
        return how(request)

    return answering


def raising(problem: Exception) -> Post:
    def fail(_request: Any) -> Any:
        raise problem

    return fail


CALLS = [("m", [i]) for i in range(25)]

# ------------------------------------------------------------------------------- rate

WORDINGS = {
    "Your app has exceeded its compute units per second capacity": 429,
    "daily request count exceeded, request rate limited": -32005,
    "over rate limit": -32016,
    "50/second request limit reached": -32007,
    "Too Many Requests": -32000,
    "call rate-limit exhausted, retry in 10s": -32090,
}


@pytest.mark.parametrize("message", WORDINGS)
async def test_what_is_refused_for_its_rate_is_asked_again(message: str) -> None:
    def how(request: Any) -> Any:
        return error(request, message, WORDINGS[message])

    assert await rpc_of(refusing(3, how)).call("m", 7) == 7


@pytest.mark.parametrize(
    "message", ["query returned more than 10000 results", "nonce too low", "limit exceeded"]
)
async def test_other_refusals_are_answers(message: str) -> None:
    rpc = rpc_of(refusing(1, lambda request: error(request, message)))
    with pytest.raises(RpcError, match=message):
        await rpc.call("m", 7)


async def test_words_of_a_contract_are_no_refusal_of_the_endpoint() -> None:
    rpc = rpc_of(refusing(1, lambda request: error(request, "reverted: capacity", 3, "0x01")))
    with pytest.raises(RpcError, match="capacity"):
        await rpc.call("m", 7)


@pytest.mark.parametrize("status", [429, 503])
async def test_status_of_a_rate_limit_is_waited_out(status: int) -> None:
    rpc = rpc_of(refusing(3, raising(refusal(status))))
    assert await rpc.call("m", 7) == 7


async def test_pause_that_is_asked_for_is_made() -> None:
    # Longer than the deadline of 0.1 s, so nothing is repeated.
    slow = rpc_of(refusing(1, raising(refusal(429, "0.2"))), timeout_s=0.1)
    with pytest.raises(ChainUnreachable, match="HTTP 429"):
        await slow.call("m", 7)
    assert await rpc_of(refusing(1, raising(refusal(429, "0.02")))).call("m", 7) == 7


@pytest.mark.parametrize("said", ["nan", "inf", "-1", "1e999"])
async def test_pause_that_is_no_number_of_seconds_is_not_made(said: str) -> None:
    rpc = rpc_of(refusing(1, raising(refusal(429, said))), timeout_s=1.0)
    async with asyncio.timeout(2.0):
        assert await rpc.call("m", 7) == 7


async def test_date_to_retry_after_is_not_misread() -> None:
    rpc = rpc_of(refusing(1, raising(refusal(429, "Mon, 23 Nov 2026 10:00:00 GMT"))))
    assert await rpc.call("m", 7) == 7


async def test_patience_ends() -> None:
    rpc = rpc_of(raising(refusal(429)), timeout_s=0.05)
    with pytest.raises(ChainUnreachable, match="HTTP 429"):
        await rpc.call("m", 7)
    limited = rpc_of(lambda request: error(request, "rate limit"), timeout_s=0.05)
    with pytest.raises(RpcError, match="rate limit"):
        await limited.call("m", 7)


async def test_only_what_was_refused_in_a_batch_is_asked_again() -> None:
    asked: list[int] = []

    def answer(request: Any) -> Any:
        requests = request if isinstance(request, list) else [request]
        first = not asked
        asked.append(len(requests))
        answers = [
            error(each, "rate limit") if first and each["params"][0] in (3, 9) else echo(each)
            for each in requests
        ]
        return answers if isinstance(request, list) else answers[0]

    assert await rpc_of(answer).batch(CALLS) == [*range(25)]
    assert asked == [25, 2]


# ---------------------------------------------------------------------------- batches


def taking(most: int, how: Post) -> tuple[Post, list[int]]:
    """Answer batches of at most `most` requests; the list gets the size of every batch."""
    sizes: list[int] = []

    def answer(request: Any) -> Any:
        size = len(request) if isinstance(request, list) else 1
        sizes.append(size)
        return how(request) if isinstance(request, list) and size > most else echo(request)

    return answer, sizes


REFUSALS: dict[str, Post] = {
    "one error": lambda _r: {"id": None, "error": {"code": -32600, "message": "batch too large"}},
    "HTTP 413": raising(refusal(413)),
    "HTTP 400": raising(refusal(400)),
}


@pytest.mark.parametrize("how", REFUSALS)
async def test_large_batches_are_made_smaller_and_stay_so(how: str) -> None:
    answer, sizes = taking(10, REFUSALS[how])
    rpc = rpc_of(answer)
    assert await rpc.batch(CALLS) == [*range(25)]
    assert sizes == [25, 12, 6, 6, 6, 6, 1]
    sizes.clear()
    assert await rpc.batch(CALLS[:12]) == [*range(12)]
    assert sizes == [6, 6]


@pytest.mark.parametrize("how", REFUSALS)
async def test_where_batches_are_refused_each_is_asked_alone(how: str) -> None:
    answer, sizes = taking(0, REFUSALS[how])
    assert await rpc_of(answer).batch(CALLS[:4]) == [*range(4)]
    assert sizes == [4, 2, 1, 1, 1, 1]


async def test_single_request_that_is_refused_is_an_error() -> None:
    with pytest.raises(ChainUnreachable, match="HTTP 413"):
        await rpc_of(raising(refusal(413))).call("m", 1)


async def test_rate_limit_of_a_batch_does_not_make_it_smaller() -> None:
    answer, sizes = taking(100, echo)
    limited = {"id": None, "error": {"code": 429, "message": "slow down: rate limit"}}
    assert await rpc_of(refusing(2, lambda _r: limited, answer)).batch(CALLS) == [*range(25)]
    assert sizes == [25]


def test_portion_is_tried_larger_ever_more_seldom() -> None:
    portion, tried = Portion(64, 64), list[int]()
    for answer in range(2000):
        if portion.size > 10:
            tried.append(answer)
            portion.refused(portion.size)
        else:
            portion.answered()
    pauses = [after - before for before, after in itertools.pairwise(tried[3:])]
    assert tried[:3] == [0, 1, 2]
    assert pauses == sorted(pauses)
    assert pauses[0] < 256 < pauses[-1]
