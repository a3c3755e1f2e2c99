"""A fake internet of sources: each answers as a test says."""

import asyncio
from collections.abc import Callable

import httpx

Answer = Callable[[httpx.Request], httpx.Response]


class Internet(httpx.AsyncBaseTransport):
    """Hosts by name; a name that is missing refuses the connection."""

    def __init__(self, **hosts: Answer) -> None:
        self.hosts = hosts
        self.asked: list[str] = []
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        # A redirected client asks an address; the name is in the SNI.
        name = str(request.extensions.get("sni_hostname") or request.url.host)
        self.asked.append(name)
        await request.aread()
        self.requests.append(request)
        answer = self.hosts.get(name.split(".")[0])
        if answer is None:
            raise httpx.ConnectError("refused", request=request)
        response = answer(request)
        if response.headers.get("x-hangs"):
            await asyncio.Event().wait()
        return response


def says(body: bytes, status: int = 200, **headers: str) -> Answer:
    return lambda _: httpx.Response(status, stream=httpx.ByteStream(body), headers=headers)
