"""An RPC endpoint that passes questions on to a real one and changes the answers."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from aiohttp import web

Lie = Callable[[str, list[Any], Any], Any]
"""Turns a method, its parameters and the honest result into what is answered."""


def honest(_method: str, _params: list[Any], result: Any) -> Any:
    return result


@contextlib.asynccontextmanager
async def endpoint(upstream: str, lie: Lie) -> AsyncIterator[str]:
    """Yield the address of an endpoint on loopback."""

    async def answer(request: web.Request) -> web.Response:
        asked = await request.json()
        async with session.post(upstream, json=asked) as response:
            answered = await response.json()
        pairs = (
            zip(asked, answered, strict=True) if isinstance(asked, list) else [(asked, answered)]
        )
        for question, reply in pairs:
            if "result" in reply:
                reply["result"] = lie(question["method"], question["params"], reply["result"])
        return web.Response(text=json.dumps(answered), content_type="application/json")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()
