"""A JSON-RPC endpoint through web3.py: deadlines, batches, errors without secrets.

`Rpc` sends requests; `Portion` and `RatePatience` learn how much an endpoint allows at once, and
how often, because each endpoint reports its limits differently; `from_hex` and the functions beside
it read the values in answers.

Requests go to web3's provider, and through the middleware that a user added to `w3`. web3's own
formatting of answers is skipped: it takes many times as long as the rest (decision 38). Nothing
here knows contracts. A request whose answer was lost is repeated, but a transaction never: the
refusal of its second copy would say nothing about the first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from muster.protocol.errors import ChainUnreachable, RpcError
from muster.protocol.ids import Hash32

if TYPE_CHECKING:
    from web3 import AsyncWeb3

    from muster.chain.providers import Post


logger = logging.getLogger(__name__)

# These libraries log whole URLs, including API keys.
for _library in ("web3", "websockets"):
    logging.getLogger(_library).setLevel(logging.WARNING)

MAX_BATCH = 100
"""Most requests in one HTTP call; endpoints refuse more."""
LONGEST_SILENCE_S = 30.0
"""Seconds without an announced block after which the reader polls anyway."""
IS_RUNNING = (
    "check that the chain is running: `muster network show` says which one is used; --rpc "
    "URL uses another"
)
SEND = "eth_sendRawTransaction"
"""The method that takes a transaction: the only one that must not be repeated here."""
_REVERT_CODE = 3

Call = tuple[str, list[Any]]
"""A method and its parameters."""


def mask_url(url: str) -> str:
    """Return scheme, host and port of a URL: the rest may hold passwords or API keys."""
    if url.startswith("/"):
        return url
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "?", f":{parts.port}" if parts.port else ""
    except ValueError:
        return "?"
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme or '?'}://{host}{port}" + ("/…" if parts.path.strip("/") else "")


class Rpc:
    """A JSON-RPC endpoint."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, post: Post | None = None) -> None:
        """`post` sends in place of HTTP, for tests. Raises ConfigError for another kind of URL."""
        # The import takes half a second; commands that read no chain skip it.
        from muster.chain.providers import provider_of

        self.masked_url = mask_url(url)
        self._provider: Any = provider_of(url, post)
        self._timeout_s = timeout_s
        self._portion = Portion(MAX_BATCH, MAX_BATCH)
        self._connecting = asyncio.Lock()
        self._is_connected = not self._provider.has_persistent_connection

    @cached_property
    def w3(self) -> AsyncWeb3[Any]:
        """web3.py over this endpoint; middleware that is added sees every request."""
        from web3 import AsyncWeb3

        return AsyncWeb3(self._provider)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; a later call opens another."""
        await self._provider.disconnect()
        self._is_connected = not self._provider.has_persistent_connection

    async def call(self, method: str, *params: Any) -> Any:
        """Return a method's result; raises ChainUnreachable or RpcError."""
        (result,) = await self.batch([(method, list(params))])
        return result

    async def batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results in order; the first that failed raises RpcError."""
        results = await self.try_batch(calls)
        for result in results:
            if isinstance(result, RpcError):
                raise result
        return results

    async def try_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return results in order, an RpcError in the place of each that failed.

        A request that was refused for its rate, or whose answer was lost, is sent again until
        `timeout_s` is over; a transaction is sent once. Another endpoint is asked only by a quorum
        (`muster.chain.quorum`).
        """
        results: dict[int, Any] = {}
        waiting, patience = list(range(len(calls))), RatePatience(self._timeout_s)
        may_repeat = not is_transaction(calls)
        while waiting:
            asked = waiting[: self._portion.size]
            try:
                outcomes = await self._ask([calls[i] for i in asked])
            except (HttpRefusal, AnswerLost) as refusal:
                if may_repeat and refusal.may_pass and await patience.waits(refusal.retry_after_s):
                    continue
                if refusal.is_for_size and len(asked) > 1:
                    self._portion.refused(len(asked))
                    continue
                raise
            if outcomes is None:
                self._portion.refused(len(asked))
                continue
            if len(asked) == self._portion.size:
                self._portion.answered()
            results.update(zip(asked, outcomes, strict=True))
            del waiting[: len(asked)]
            limited = [i for i in asked if _is_limited(results[i])]
            if limited and await patience.waits():
                waiting = limited + waiting
        return [results[i] for i in range(len(calls))]

    async def next_block(self) -> None:
        """Wait until the endpoint announces a block; return at once over HTTP, which announces
        none.

        Also returns after half a minute and on any error, so that a silent endpoint only delays its
        reader.
        """
        if not self._provider.has_persistent_connection:
            return
        try:
            if await self._exchange(self._provider.subscribe_to_blocks):
                async with asyncio.timeout(LONGEST_SILENCE_S):
                    await self._provider.told_of_block.wait()
        except (TimeoutError, ChainUnreachable) as error:
            logger.debug("no block was told of", extra={"cause": str(error)})
        self._provider.told_of_block.clear()

    async def _ask(self, calls: list[Call]) -> list[Any] | None:
        """Return the outcomes of one request; None if the endpoint refuses so large a batch."""
        if len(calls) == 1:
            (method, params), answers = calls[0], None
            answer = await self._exchange(lambda: self._send(method, params))
        else:
            answer = await self._exchange(lambda: self._send_batch(calls))
            answers = answer if isinstance(answer, list) else None
        if answers is None:
            if not isinstance(answer, dict):
                raise self._garbled("not a JSON object")
            error = self._outcome(calls[0][0], answer)
            if len(calls) > 1 and not _is_limited(error):
                return None
            answers = [answer] * len(calls)
        return [self._outcome(method, a) for (method, _), a in zip(calls, answers, strict=True)]

    def _outcome(self, method: str, answer: dict[str, Any]) -> Any:
        """Return the result, or the RpcError in its place."""
        error = answer.get("error")
        if error is not None:
            return rpc_error(method, error)
        if "result" not in answer:
            raise self._garbled(f"neither result nor error for {method}")
        return answer["result"]

    async def _exchange(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Return an answer's JSON; every failure of the connection becomes ChainUnreachable."""
        from aiohttp import (
            ClientConnectorError,
            ClientError,
            ClientPayloadError,
            ServerDisconnectedError,
        )
        from web3.exceptions import Web3Exception
        from websockets import WebSocketException

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connect()
                return await send()
        except TimeoutError as error:
            await self._drop()
            raise ChainUnreachable(
                f"{self.masked_url} did not answer within {self._timeout_s:g} s", hint=IS_RUNNING
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._garbled("not JSON") from error
        except (ClientError, OSError, ValueError, Web3Exception, WebSocketException) as e:
            await self._drop()
            is_lost = isinstance(e, ServerDisconnectedError | ClientPayloadError | ConnectionError)
            is_refused = isinstance(e, ClientConnectorError | ConnectionRefusedError)
            # The library's message can contain the URL with its secrets.
            raise (AnswerLost if is_lost and not is_refused else ChainUnreachable)(
                f"{self.masked_url} does not answer: {type(e).__name__}", hint=IS_RUNNING
            ) from None

    async def _send(self, method: str, params: list[Any]) -> Any:
        send = self._provider.make_request
        for middleware in self._added_middleware():
            send = await middleware(self.w3).async_wrap_make_request(send)
        return await send(method, params)

    async def _send_batch(self, calls: list[Call]) -> Any:
        send = self._provider.make_batch_request
        for middleware in self._added_middleware():
            send = await middleware(self.w3).async_wrap_make_batch_request(send)
        return await send(calls)

    def _added_middleware(self) -> list[Any]:
        """Return the middleware that a user added to web3's own, innermost first."""
        if "w3" not in vars(self):
            return []
        own = {middleware for middleware, _ in self.w3.manager.get_default_middleware()}
        onion = self.w3.middleware_onion.as_tuple_of_middleware()
        return [middleware for middleware in reversed(onion) if middleware not in own]

    async def _connect(self) -> None:
        """Open a connection that is kept, unless it is open."""
        async with self._connecting:
            if not self._is_connected:
                await self._provider.connect()
                self._is_connected = True

    async def _drop(self) -> None:
        """Close a connection that is kept, so that the next request opens another."""
        if self._provider.has_persistent_connection:
            async with self._connecting:
                await self.close()

    def _garbled(self, what: str) -> ChainUnreachable:
        return ChainUnreachable(
            f"{self.masked_url} does not speak JSON-RPC: {what}", hint=IS_RUNNING
        )


def is_transaction(calls: Sequence[Call]) -> bool:
    """Return whether a request sends a transaction, which is then its only call."""
    return any(method == SEND for method, _ in calls)


def _is_limited(outcome: Any) -> bool:
    return isinstance(outcome, RpcError) and is_for_rate(outcome)


def rpc_error(method: str, error: Any) -> RpcError:
    """Return the error of a JSON-RPC `error` member."""
    if not isinstance(error, dict):
        return RpcError(f"{method} failed: {str(error)[:200]}", code=0)
    code, message = error.get("code"), str(error.get("message", ""))[:500]
    return RpcError(
        f"{method} failed: {message}",
        code=code if isinstance(code, int) else 0,
        data=_error_data(error.get("data")),
    )


def _error_data(data: Any) -> bytes:
    """Return a revert's bytes, which endpoints put into different places."""
    if isinstance(data, dict):
        data = data.get("data") or data.get("result")
    if not isinstance(data, str):
        return b""
    try:
        return bytes.fromhex(data.removeprefix("Reverted ").removeprefix("0x"))
    except ValueError:
        return b""


def is_revert(error: RpcError) -> bool:
    """Return whether an error says that a contract reverted."""
    return error.code == _REVERT_CODE or bool(error.data) or "revert" in str(error).lower()


# ------------------------------------------------------- what an endpoint grants

_PATIENCE = 8, 256
"""Answers in a row after which a refused size is tried again: at first, and at most."""
_PAUSE_S = 0.1, 2.0
"""Pause in seconds before a retry, at first and at most, unless the endpoint names one."""
_RATE_CODES = frozenset({429, -32007, -32016, -32029})
_RATE_WORDS = re.compile(
    r"rate.{0,2}limit|too many requests|requests? limit|request count|per second|compute units"
    r"|throttl|capacity",
    re.IGNORECASE,
)
_SECONDS = re.compile(r"\d{1,9}(\.\d+)?")
_BATCH_STATUSES = frozenset({400, 403, 405, 413, 415, 422, 500, 501})
_PASSING_STATUSES = frozenset({408, 429, 502, 503, 504})


class AnswerLost(ChainUnreachable):
    """A connection ended before its answer did."""

    may_pass, retry_after_s, is_for_size = True, 0.0, False


class HttpRefusal(ChainUnreachable):
    """An endpoint answered with an HTTP error status and no JSON."""

    def __init__(self, message: str, *, status: int, retry_after: str | None, hint: str) -> None:
        """`retry_after` is the header of that name, if there was one."""
        super().__init__(message, hint=hint)
        self.status = status
        # It may be a date; and a pause of nan seconds would never end.
        is_seconds = _SECONDS.fullmatch(retry_after or "") is not None
        self.retry_after_s = float(retry_after or 0) if is_seconds else 0.0

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.status in _PASSING_STATUSES

    @property
    def is_for_size(self) -> bool:
        """Whether a smaller request may succeed: endpoints refuse large batches with various
        statuses.
        """
        return self.status in _BATCH_STATUSES


def is_for_rate(error: RpcError) -> bool:
    """Return whether the same request may succeed a little later."""
    if error.data:
        # The message is the contract's own.
        return False
    return error.code in _RATE_CODES or _RATE_WORDS.search(str(error)) is not None


class Portion:
    """Size of a request: smaller after a refusal, and from time to time larger again."""

    def __init__(self, first: int, most: int) -> None:
        """Start with `first`, and never exceed `most`."""
        self.size = first
        self._most = self._granted = most
        self._patience = _PATIENCE[0]
        self._answers = 0

    def answered(self, *, is_much: bool = False, is_little: bool = True) -> None:
        """Adapt to an answer: request less after a big one, more after a small one."""
        self._answers += 1
        if self._answers >= self._patience:
            self._granted = min(2 * self._granted, self._most)
            self._answers = 0
        if is_much:
            self.size = max(1, self.size // 2)
        elif is_little:
            self.size = min(2 * self.size, self._granted)

    def refused(self, size: int) -> None:
        """Request half of the refused size, and keep it longer after each refusal."""
        self._granted = self.size = max(1, size // 2)
        self._patience = min(2 * self._patience, _PATIENCE[1])
        self._answers = 0

    def unanswered(self) -> None:
        """Request less: it may have been too much to answer in time."""
        self.size = max(1, self.size // 2)


class RatePatience:
    """Pauses between retries of a request that was refused for its rate, until a deadline."""

    def __init__(self, total_s: float) -> None:
        self._until = asyncio.get_running_loop().time() + total_s
        self._pause_s = _PAUSE_S[0]

    async def waits(self, at_least_s: float = 0.0) -> bool:
        """Wait and return True; return False at once when the deadline leaves no time."""
        pause_s = max(at_least_s, self._pause_s * random.uniform(0.5, 1.0))
        if asyncio.get_running_loop().time() + pause_s > self._until:
            return False
        await asyncio.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
        return True


# ------------------------------------------------------------- values in answers

_QUANTITY = re.compile(r"0x[0-9a-fA-F]{1,64}")
_HASH = re.compile(r"0x[0-9a-fA-F]{64}")


def is_quantity(value: Any) -> bool:
    """Return whether an answer is a quantity of at most 256 bits."""
    return isinstance(value, str) and _QUANTITY.fullmatch(value) is not None


def from_hex(value: Any) -> int:
    """Return a quantity of at most 256 bits; raises ChainUnreachable for anything else."""
    if not is_quantity(value):
        raise garbled(f"{str(value)[:80]!r} is no quantity")
    return int(value, 16)


def nonce_from_hex(value: Any) -> int:
    """Return an account's nonce, below the 2^63 that the journal of transactions can store; raises
    ChainUnreachable for anything else. EIP-2681 limits it to 64 bits.
    """
    nonce = from_hex(value)
    if nonce >= 1 << 63:
        raise garbled(f"{value} is no nonce")
    return nonce


def hash_from_hex(value: Any) -> Hash32:
    """Return 32 bytes; raises ChainUnreachable for anything else."""
    if not isinstance(value, str) or _HASH.fullmatch(value) is None:
        raise garbled(f"{str(value)[:80]!r} is no hash")
    return Hash32(bytes.fromhex(value[2:]))


def member(value: Any, name: str) -> Any:
    """Return a member of a JSON object; raises ChainUnreachable when there is none."""
    if not isinstance(value, dict) or name not in value:
        raise garbled(f"no {name!r} in {str(value)[:80]!r}")
    return value[name]


def garbled(what: str) -> ChainUnreachable:
    """Return the error for an invalid answer of an endpoint."""
    return ChainUnreachable(f"the RPC endpoint answers nonsense: {what}", hint="is --rpc right?")


@dataclass(frozen=True, slots=True)
class LatestBlock:
    """A block's number, hash and time; usually the chain's head."""

    number: int
    """Its height."""
    hash: Hash32
    timestamp: int
    """Its time."""

    @classmethod
    def from_rpc(cls, block: Any) -> Self:
        """Parse an answer to `eth_getBlockByNumber`; raises ChainUnreachable."""
        return cls(
            number=from_hex(member(block, "number")),
            hash=hash_from_hex(member(block, "hash")),
            timestamp=from_hex(member(block, "timestamp")),
        )
