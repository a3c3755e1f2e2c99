"""A JSON-RPC endpoint through web3.py: deadlines, batches, errors without secrets.

Requests go to web3's provider, and through what middleware a user added to `w3`. What web3 makes of
answers by itself is left out: it takes many times as long as all the rest (decision 38). Knows
nothing of contracts. All methods Muster uses may be repeated, so a request is sent a second time
when a kept-alive connection turns out to be closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from muster.chain.granting import AnswerLost, HttpRefusal, Patience, Portion, is_for_rate
from muster.chain.quantities import from_hex as from_hex
from muster.protocol.errors import ChainUnreachable, RpcError

if TYPE_CHECKING:
    from web3 import AsyncWeb3

    from muster.chain.providers import Post

logger = logging.getLogger(__name__)

# They log whole URLs, with the keys in them.
for _library in ("web3", "websockets"):
    logging.getLogger(_library).setLevel(logging.WARNING)

MAX_BATCH = 100
"""Requests in one HTTP call; endpoints refuse more."""
LONGEST_SILENCE_S = 30.0
"""So long a node is believed that tells of no block."""
IS_RUNNING = (
    "is the chain running? `muster network show` says which one is meant; --rpc names another"
)
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
        """`post` sends in place of HTTP, for tests. Raises ConfigError for what is no endpoint."""
        # Half a second of a core, which a command that reads no chain need not spend.
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
        """Return results in order, an RpcError in the place of each that failed."""
        results: dict[int, Any] = {}
        waiting, patience = list(range(len(calls))), Patience(self._timeout_s)
        while waiting:
            asked = waiting[: self._portion.size]
            try:
                outcomes = await self._ask([calls[i] for i in asked])
            except (HttpRefusal, AnswerLost) as refusal:
                if refusal.may_pass and await patience.waits(refusal.retry_after_s):
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
        """Wait until a block was told of since the last time; not where blocks are not told of.

        Endpoints over HTTP tell nothing: who polls them must pause. Returns after half a minute and
        on every trouble too, so that a silent endpoint delays, and hides nothing.
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
        """Return the outcomes of one request; None when the endpoint takes no batch of its size."""
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
        try:
            return self._result(method, answer)
        except RpcError as error:
            return error

    def _result(self, method: str, answer: dict[str, Any]) -> Any:
        error = answer.get("error")
        if error is not None:
            raise rpc_error(method, error)
        if "result" not in answer:
            raise self._garbled(f"neither result nor error for {method}")
        return answer["result"]

    async def _exchange(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Return an answer's JSON; what the connection fails with becomes ChainUnreachable."""
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
        """Return what somebody added to web3's own middleware, innermost first."""
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


def _is_limited(outcome: Any) -> bool:
    return isinstance(outcome, RpcError) and is_for_rate(outcome)


def rpc_error(method: str, error: Any) -> RpcError:
    """Return the error that a JSON-RPC `error` member stands for."""
    if not isinstance(error, dict):
        return RpcError(f"{method} failed: {str(error)[:200]}", code=0)
    code, message = error.get("code"), str(error.get("message", ""))[:500]
    return RpcError(
        f"{method} failed: {message}",
        code=code if isinstance(code, int) else 0,
        data=_error_data(error.get("data")),
    )


def _error_data(data: Any) -> bytes:
    """Return a revert's bytes, wherever the endpoint hides them."""
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
