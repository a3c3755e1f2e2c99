"""JSON-RPC over HTTP: one session, a deadline on every request, batches, errors without secrets.

Knows nothing of contracts. All methods Muster uses may be repeated, so a request is sent a second
time when a kept-alive connection turns out to be closed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from muster.chain.quantities import from_hex as from_hex
from muster.protocol.errors import ChainUnreachable, RpcError

logger = logging.getLogger(__name__)

MAX_BATCH = 100
"""Requests in one HTTP call; endpoints refuse more."""
MAX_ANSWER_BYTES = 256 << 20
"""Largest answer that is read: 10,000 logs of 24 kB."""
_RUN_DRY = "is the chain running, and is --rpc right?"
_REVERT_CODE = 3

Call = tuple[str, list[Any]]
"""A method and its parameters."""
Post = Callable[[bytes], Awaitable[bytes]]
"""Sends a request body, returns the answer's; raises OSError or aiohttp.ClientError."""


def mask_url(url: str) -> str:
    """Return scheme, host and port of a URL: the rest may hold passwords or API keys."""
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
        self.masked_url = mask_url(url)
        self._url = url
        self._timeout_s = timeout_s
        self._post = post or self._http_post
        self._session: aiohttp.ClientSession | None = None
        self._ids = itertools.count(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the session; a later call opens another."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, method: str, *params: Any) -> Any:
        """Return a method's result; raises ChainUnreachable or RpcError."""
        request = self._request(method, list(params))
        answer = await self._exchange(request)
        if not isinstance(answer, dict):
            raise self._garbled("not a JSON object")
        return self._result(method, answer)

    async def batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results in order; the first that failed raises RpcError."""
        results = await self.try_batch(calls)
        for result in results:
            if isinstance(result, RpcError):
                raise result
        return results

    async def try_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return results in order, an RpcError in the place of each that failed."""
        results: list[Any] = []
        for start in range(0, len(calls), MAX_BATCH):
            results += await self._batch(calls[start : start + MAX_BATCH])
        return results

    async def _batch(self, calls: Sequence[Call]) -> list[Any]:
        requests = [self._request(method, params) for method, params in calls]
        answers = await self._exchange(requests)
        if not isinstance(answers, list):
            # Endpoints that do not take the batch answer with one error.
            answers = [answers] * len(requests) if isinstance(answers, dict) else []
            by_id = dict(zip((r["id"] for r in requests), answers, strict=False))
        else:
            by_id = {a["id"]: a for a in answers if _has_number(a)}
        return [self._outcome(request, by_id.get(request["id"])) for request in requests]

    def _outcome(self, request: dict[str, Any], answer: dict[str, Any] | None) -> Any:
        if answer is None:
            raise self._garbled(f"no answer to {request['method']} in a batch")
        try:
            return self._result(request["method"], answer)
        except RpcError as error:
            return error

    def _request(self, method: str, params: list[Any]) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}

    def _result(self, method: str, answer: dict[str, Any]) -> Any:
        error = answer.get("error")
        if error is not None:
            raise rpc_error(method, error)
        if "result" not in answer:
            raise self._garbled(f"neither result nor error for {method}")
        return answer["result"]

    async def _exchange(self, request: Any) -> Any:
        body = json.dumps(request).encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._post_again(body)
        except TimeoutError as error:
            raise ChainUnreachable(
                f"{self.masked_url} did not answer within {self._timeout_s:g} s", hint=_RUN_DRY
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The library's message can contain the URL with its secrets.
            raise ChainUnreachable(
                f"{self.masked_url} does not answer: {type(error).__name__}", hint=_RUN_DRY
            ) from None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._garbled("not JSON") from error

    async def _post_again(self, body: bytes) -> bytes:
        try:
            return await self._post(body)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError):
            logger.debug("connection was closed, sending again")
            return await self._post(body)

    async def _http_post(self, body: bytes) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"content-type": "application/json"})
        async with self._session.post(self._url, data=body) as response:
            answer = await self._read(response)
        # JSON-RPC errors may travel in any status; what else is refused has no JSON.
        if response.status >= 400 and not answer.lstrip().startswith((b"{", b"[")):
            raise ChainUnreachable(
                f"{self.masked_url} answers HTTP {response.status}",
                hint="wait a little" if response.status in (429, 503) else _RUN_DRY,
            )
        return answer

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                response.close()
                raise ChainUnreachable(
                    f"{self.masked_url} answers more than {MAX_ANSWER_BYTES} bytes",
                    hint="use another RPC endpoint",
                )
        return b"".join(parts)

    def _garbled(self, what: str) -> ChainUnreachable:
        return ChainUnreachable(
            f"{self.masked_url} does not speak JSON-RPC: {what}", hint="is --rpc right?"
        )


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


def _has_number(answer: Any) -> bool:
    return isinstance(answer, dict) and type(answer.get("id")) is int


def is_revert(error: RpcError) -> bool:
    """Return whether an error says that a contract reverted."""
    return error.code == _REVERT_CODE or bool(error.data) or "revert" in str(error).lower()
