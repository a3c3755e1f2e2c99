"""Providers for web3.py that suit a node which runs for weeks.

They differ from web3's own (8.0): one HTTP session stays open and its answers are bounded, while
web3 opens a connection for every request; a request over a socket waits for its answer, while web3
polls for it in every turn of the event loop. Subscriptions are web3's.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from web3 import AsyncHTTPProvider, AsyncIPCProvider, WebSocketProvider
from web3.exceptions import PersistentConnectionClosedOK
from web3.providers import PersistentConnectionProvider
from web3.types import RPCEndpoint, RPCResponse

from muster.chain.rpc import IS_RUNNING, SEND, HttpRefusal, mask_url
from muster.protocol.errors import ChainUnreachable, ConfigError

MAX_ANSWER_BYTES = 256 << 20
"""Largest answer that is read: 10,000 logs of 24 kB."""
MAX_ANSWER_VALUES = MAX_ANSWER_BYTES // 32
"""Most values in an answer: one of an honest answer is longer, and takes 80 bytes once parsed."""
NO_POST = 405
"""HTTP status of a server that takes no POST at this URL."""

_ONE_TRY: dict[str, Any] = {"max_connection_retries": 1}

Post = Callable[[bytes], Awaitable[bytes]]
"""Sends a request body, returns the answer's body; raises OSError or aiohttp.ClientError."""
Provider = AsyncHTTPProvider | WebSocketProvider | AsyncIPCProvider
Requests = list[tuple[RPCEndpoint, Any]]


class HttpProvider(AsyncHTTPProvider):
    """An endpoint over HTTP."""

    def __init__(self, url: str, post: Post | None = None) -> None:
        """`post`, if given, replaces HTTP."""
        # With web3's retries, a transaction whose answer was lost would be sent twice.
        super().__init__(url, exception_retry_configuration=None)
        self._url = url
        self._post = post or self._http_post
        self._session: aiohttp.ClientSession | None = None

    async def make_request(self, method: RPCEndpoint, params: Any) -> RPCResponse:
        """Return the answer, errors included."""
        body = self.encode_rpc_request(method, params)
        answer = await (self._post if method == SEND else self._send)(body)
        return cast(RPCResponse, _parsed(answer))

    async def make_batch_request(self, batch_requests: Requests) -> Any:
        """Return the answers in order, or the single error of a refused batch."""
        requests = [self.form_request(method, params) for method, params in batch_requests]
        body = self.encode_batch_request_dicts(requests)
        answers = _parsed(await self._send(body))
        if isinstance(answers, dict):
            return answers
        listed = answers if isinstance(answers, list) else []
        by_id = {a.get("id"): a for a in listed if isinstance(a, dict) and type(a.get("id")) is int}
        for request in requests:
            if request["id"] not in by_id:
                raise ChainUnreachable(
                    f"{mask_url(self._url)} does not speak JSON-RPC: no answer to "
                    f"{request['method']} in a batch",
                    hint=IS_RUNNING,
                )
        return [by_id[request["id"]] for request in requests]

    async def disconnect(self) -> None:
        """Close the session; a later request opens another."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self, body: bytes) -> bytes:
        try:
            return await self._post(body)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError):
            # The other end had closed a connection that was kept open.
            return await self._post(body)

    async def _http_post(self, body: bytes) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self.get_request_headers())
        async with self._session.post(self._url, data=body) as response:
            answer = await self._read(response)
        # JSON-RPC errors may come with any HTTP status, but not with that of a server that takes no
        # POST, such as an orchestrator. Other refusals have no JSON.
        is_json = answer.lstrip().startswith((b"{", b"["))
        if response.status == NO_POST or (response.status >= 400 and not is_json):
            what = ": it is no chain's endpoint" if response.status == NO_POST else ""
            raise HttpRefusal(
                f"{mask_url(self._url)} answers HTTP {response.status}{what}",
                status=response.status,
                retry_after=response.headers.get("retry-after"),
                hint="wait a minute and try again" if response.status in (429, 503) else IS_RUNNING,
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
                    f"{mask_url(self._url)} answers more than {MAX_ANSWER_BYTES} bytes",
                    hint="use another RPC endpoint",
                )
        return b"".join(parts)


def _parsed(answer: bytes | str) -> Any:
    """Return an answer's JSON; raises ValueError for more values than memory should hold."""
    marks: Iterable[Any] = ",[{" if isinstance(answer, str) else (b",", b"[", b"{")
    if sum(map(answer.count, marks)) > MAX_ANSWER_VALUES:
        raise ValueError("too many values")
    return json.loads(answer)


class _PromptAnswers(PersistentConnectionProvider):
    """Passes each answer to its waiting request as soon as it arrives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[Any, asyncio.Future[RPCResponse]] = {}
        self._is_lost = False
        self._heads: Any = None
        self.told_of_block = asyncio.Event()
        """Set when the node announces a block, or the connection has ended."""

    async def connect(self) -> None:
        """Open the connection."""
        self._is_lost, self._heads = False, None
        await super().connect()

    async def make_request(self, method: RPCEndpoint, params: Any) -> RPCResponse:
        """Return the answer, errors included; raises OSError when the connection is lost."""
        if self._is_lost:
            raise ConnectionResetError
        request = self.form_request(method, params)
        answer: asyncio.Future[RPCResponse] = asyncio.get_running_loop().create_future()
        self._waiting[request["id"]] = answer
        try:
            await self.socket_send(self.encode_rpc_dict(request))
            return await answer
        finally:
            del self._waiting[request["id"]]

    async def subscribe_to_blocks(self) -> bool:
        """Subscribe to new blocks on this connection; return whether the node supports it.

        Raises OSError when the connection is lost.
        """
        if self._is_lost:
            raise ConnectionResetError
        if self._heads is None:
            answer = await self.make_request(RPCEndpoint("eth_subscribe"), ["newHeads"])
            # Requested once: not every endpoint has subscriptions.
            self._heads = answer.get("result", False)
        return bool(self._heads)

    async def make_batch_request(self, requests: Requests) -> list[RPCResponse]:
        """Return the answers in order. Requests are sent separately: over a socket none waits for
        another.
        """
        return list(await asyncio.gather(*(self.make_request(*request) for request in requests)))

    async def socket_recv(self) -> RPCResponse:
        """Return the next message of a subscription that a user of web3 made."""
        while True:
            try:
                answer = await super().socket_recv()  # type: ignore[safe-super]  # of the mixed-in
            except Exception as error:
                # The connection has ended, or nonsense came over it: no answer comes any more.
                self._is_lost = True
                self.told_of_block.set()
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(ConnectionResetError())
                # Any other error web3 would raise where the connection is closed.
                raise PersistentConnectionClosedOK(user_message=type(error).__name__) from error
            if not isinstance(answer, dict):
                continue
            number, subscription = answer.get("id"), _subscription(answer)
            if self._heads and subscription == self._heads:
                self.told_of_block.set()
            elif type(number) is int and number in self._waiting:
                if not self._waiting[number].done():
                    self._waiting[number].set_result(answer)
            elif answer.get("method") == "eth_subscription" and isinstance(subscription, str):
                return answer


def _subscription(answer: RPCResponse) -> Any:
    params = answer.get("params")
    return params.get("subscription") if isinstance(params, dict) else None


_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}/?")


class _BoundedSocket(WebSocketProvider):
    async def socket_recv(self) -> RPCResponse:
        assert self._ws is not None  # connect
        return cast(RPCResponse, _parsed(await self._ws.recv()))


class SocketProvider(_PromptAnswers, _BoundedSocket):
    """An endpoint over a WebSocket."""


class IpcProvider(_PromptAnswers, AsyncIPCProvider):
    """An endpoint over a Unix socket."""


def provider_of(url: str, post: Post | None = None) -> Provider:
    """Return the provider for a URL or the path of a socket; raises ConfigError for others."""
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return HttpProvider(url, post)
    if scheme in ("ws", "wss"):
        return SocketProvider(url, websocket_kwargs={"max_size": MAX_ANSWER_BYTES}, **_ONE_TRY)
    if not scheme and Path(url).is_socket():
        return IpcProvider(url, read_buffer_limit=MAX_ANSWER_BYTES, **_ONE_TRY)
    if _HOST_AND_PORT.fullmatch(url):
        raise ConfigError(f"the RPC endpoint {url} lacks its scheme", hint=f"write http://{url}")
    raise ConfigError(
        f"{mask_url(url)} is no RPC endpoint",
        hint="--rpc takes http://, https://, ws:// or wss:// URLs, or the path of a node's socket",
    )
