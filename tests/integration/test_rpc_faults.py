"""An RPC endpoint that lies, lags, refuses or breaks: each has its outcome, and none ends a reader.

Every fault goes over HTTP: the proxy stands between the reader and a real chain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from chain_scenario import OWNER, Scenario, network, play
from rpc_proxy import (
    Failure,
    RpcProxy,
    breaking_off,
    dropping,
    flooding,
    refusing,
    sending,
    staying_silent,
    trickling,
)

from muster.chain import Chain, ChainView, EventReader, apply_poll
from muster.protocol.errors import ChainUnreachable, RpcError


@asynccontextmanager
async def behind_proxy() -> AsyncIterator[tuple[Scenario, RpcProxy, Chain]]:
    """A chain with a judged batch, and a connection to it whose endpoint can be made to fail."""
    async with (
        network() as net,
        RpcProxy(net.anvil.rpc_url) as proxy,
        await Chain.connect(proxy.url, net.deployment, timeout_s=0.5) as chain,
    ):
        await play(net)
        yield net, proxy, chain


async def view_of(chain: Chain) -> ChainView:
    view = ChainView()
    apply_poll(view, await EventReader(chain).poll())
    return view


FAILURES: dict[str, tuple[Failure, type[Exception], str]] = {
    "limits the rate": (refusing(429, retry_after="1"), ChainUnreachable, "answers HTTP 429"),
    "is overloaded": (refusing(503), ChainUnreachable, "answers HTTP 503"),
    "is a gateway": (refusing(502, "<html>"), ChainUnreachable, "answers HTTP 502"),
    "drops the connection": (dropping, ChainUnreachable, "does not answer: ServerDisconnected"),
    "breaks off": (breaking_off, ChainUnreachable, "does not answer: ClientPayloadError"),
    "never answers": (staying_silent, ChainUnreachable, "did not answer within 0.5 s"),
    "trickles": (trickling, ChainUnreachable, "did not answer within 0.5 s"),
    "floods": (flooding, ChainUnreachable, "answers more than"),
    "is a web page": (sending(b"<html>"), ChainUnreachable, "not JSON"),
    "answers nothing": (sending(b""), ChainUnreachable, "not JSON"),
    "answers bytes": (sending(bytes(range(256))), ChainUnreachable, "not JSON"),
    "nests": (sending(b"[" * 200_000), ChainUnreachable, "not JSON"),
    "answers null": (sending(b"null"), ChainUnreachable, "does not speak JSON-RPC"),
    "answers a number": (sending(b"1e999"), ChainUnreachable, "does not speak JSON-RPC"),
    "answers ids of its own": (
        sending(b'[{"id": [], "result": 1}, {"id": 7777, "result": 1}]'),
        ChainUnreachable,
        "no answer to",
    ),
    "limits the rate in JSON": (
        sending(b'{"error": {"code": -32005, "message": "limit exceeded"}}'),
        RpcError,
        "limit exceeded",
    ),
}


async def test_every_failure_has_its_outcome_and_reading_goes_on_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.chain.rpc.MAX_ANSWER_BYTES", 4 << 20)
    async with behind_proxy() as (net, proxy, chain):
        reader, view = EventReader(chain), ChainView()
        for name, (failure, error, message) in FAILURES.items():
            with proxy.failing(failure), pytest.raises(error, match=message) as caught:
                await reader.poll()
            assert net.anvil.rpc_url not in str(caught.value), name
        apply_poll(view, await reader.poll())
        assert view.batches == (await view_of(net.of(OWNER))).batches != {}
