"""Hostile orchestrators: a worker signs nothing that contradicts the chain, whatever they answer.

The real client over HTTP, the real loop; only the other side lies.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from worlds.client_desk import Desk, run_until
from worlds.client_world import (
    DOMAIN,
    NODE_KEY,
    NOW,
    ORCHESTRATOR_KEY,
    OTHER_KEY,
    make_ticket,
    sign_ticket,
)

from muster.api import OrchestratorApi
from muster.api.client import MAX_SMALL_ANSWER_BYTES
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import to_address
from muster.protocol.messages import Ticket

Answer = Callable[[httpx.Request], httpx.Response]
HONEST = make_ticket()


class Liar:
    """An orchestrator that answers leases as a test says, and records its requests."""

    def __init__(self, lease: Answer) -> None:
        self._lease = lease
        self.leases = 0
        self.uploads: list[httpx.Request] = []
        self.elsewhere: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.host != "orchestrator.test":
            self.elsewhere.append(str(request.url))
        if request.method == "PUT":
            self.uploads.append(request)
            return httpx.Response(202, json={"submission_id": "0x"})
        if request.url.path == "/v1/leases":
            self.leases += 1
            return self._lease(request)
        return httpx.Response(200, json={"status": "active", "policy_version": 3})


@asynccontextmanager
async def facing(state: Path, lease: Answer, *, timeout_s: float = 5) -> AsyncIterator[Any]:
    """Open a worker's desk whose orchestrator is a liar."""
    liar, desk = Liar(lease), Desk(state)
    api = OrchestratorApi(
        "http://orchestrator.test",
        key=NODE_KEY,
        domain=DOMAIN,
        audience=address_of(ORCHESTRATOR_KEY),
        transport=httpx.MockTransport(liar),
        timeout_s=timeout_s,
        clock=lambda: NOW,
        backoff_s=0.0,
    )
    object.__setattr__(desk.loop.context, "api", api)  # its uploads ask it, too
    async with api:
        yield desk, liar
    desk.close()


def leased(ticket: Ticket, key: bytes = ORCHESTRATOR_KEY, **changes: object) -> Answer:
    """Answer with a signed ticket, some of its JSON changed after it was signed."""
    body = {"ticket": ticket.to_json() | changes, "signature": hex0x(sign_ticket(ticket, key))}
    # Python writes NaN and Infinity, which are not JSON; a liar can send them.
    return lambda _request: httpx.Response(200, content=json.dumps(body))


LIES = {
    "for another worker": leased(make_ticket(worker=to_address(bytes(20)))),
    "for another worker, said to be ours": leased(
        make_ticket(worker=to_address(bytes(20))), worker=HONEST.worker
    ),
    "for another run": leased(make_ticket(run_id=8)),
    "signed by somebody else": leased(HONEST, OTHER_KEY),
    "another beacon, so other seeds": leased(make_ticket(beacon=keccak(b"ground"))),
    "another policy than the chain's": leased(make_ticket(policy_root=keccak(b"poisoned"))),
    "another index than it signed": leased(HONEST, index=1),
    "a deadline that is over": leased(make_ticket(deadline=NOW - 1)),
    "a deadline in years": leased(make_ticket(deadline=NOW + 10**9)),
    "step 0": leased(make_ticket(step=0)),
    "an index beyond 32 bits": leased(HONEST, index=1 << 32),
    "a negative index": leased(HONEST, index=-1),
    "an index that is no whole number": leased(HONEST, index=0.5),
    "an infinite deadline": leased(HONEST, deadline=float("inf")),
    "a deadline that is no number": leased(HONEST, deadline=float("nan")),
    "a number of a million digits": lambda _: httpx.Response(
        200, content=b'{"ticket": ' + b"9" * 1_000_000 + b"}"
    ),
    "brackets without end": lambda _: httpx.Response(200, content=b"[" * 60_000),
    "no JSON": lambda _: httpx.Response(200, content=b"\xff\xfe"),
    "nothing": lambda _: httpx.Response(200, content=b""),
    "a signature of no length": lambda _: httpx.Response(
        200, json={"ticket": HONEST.to_json(), "signature": "0x"}
    ),
    "a redirect": lambda _: httpx.Response(307, headers={"location": "http://evil.test/v1/leases"}),
    "a packed answer": lambda _: httpx.Response(
        200, content=gzip.compress(bytes(1 << 20)), headers={"content-encoding": "gzip"}
    ),
    "a refusal that drives the terminal": lambda _: httpx.Response(
        403, json={"error": {"code": "\x1b[2J", "message": "\x1b]0;pwned\x07" * 10**5}}
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_is_never_worked_on_and_never_ends_the_worker(
    tmp_path: Path, lie: Answer
) -> None:
    async with facing(tmp_path, lie) as (desk, liar):
        await run_until(desk.loop, lambda: liar.leases >= 5)
        assert not liar.uploads
        assert not liar.elsewhere
        assert not desk.journal.unfinished()
        assert not desk.engine.loaded


async def test_an_endless_answer_is_left_after_its_first_bytes(tmp_path: Path) -> None:
    sent = 0

    async def flood() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 4096
            yield bytes(4096)

    async with facing(tmp_path, lambda _: httpx.Response(200, content=flood())) as (desk, liar):
        await run_until(desk.loop, lambda: liar.leases >= 2)
        assert sent <= liar.leases * (MAX_SMALL_ANSWER_BYTES + 4096)
        assert not liar.uploads


async def test_an_answer_that_trickles_is_given_up(tmp_path: Path) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.001)
            yield b" "

    lie: Answer = lambda _: httpx.Response(200, content=trickle())  # noqa: E731
    async with facing(tmp_path, lie, timeout_s=0.005) as (desk, liar):
        await run_until(desk.loop, lambda: desk.loop.held.outages.lasting == ["the orchestrator"])
        assert liar.leases >= 4
        assert not liar.uploads


async def test_a_ticket_that_comes_again_and_again_is_signed_once_and_asked_for_ever_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with facing(tmp_path, leased(HONEST)) as (desk, liar):
        await run_until(desk.loop, lambda: len(liar.uploads) >= 5)
        files = {request.content for request in liar.uploads}
        claims = {request.headers["x-muster-submission"] for request in liar.uploads}
        assert (len(files), len(claims)) == (1, 1)
        assert len(desk.journal.unfinished()) == 1
        told = [r for r in caplog.records if "ticket that can be worked on" in r.getMessage()]
        assert len(told) == 1


async def test_a_slot_that_was_settled_is_not_signed_anew(tmp_path: Path) -> None:
    async with facing(tmp_path, leased(HONEST)) as (desk, liar):
        await desk.loop.work_once()
        desk.journal.finish(desk.journal.signed(HONEST), "ACCEPTED")
        await run_until(desk.loop, lambda: liar.leases >= 5)
        assert len(liar.uploads) == 1


@pytest.mark.parametrize("after", ["inf", "1e300", "nan", "-5", "x" * 1000])
async def test_a_pause_that_is_asked_for_is_bounded(tmp_path: Path, after: str) -> None:
    lie: Answer = lambda _: httpx.Response(204, headers={"retry-after": after})  # noqa: E731
    async with facing(tmp_path, lie) as (desk, _):
        assert 0 < await desk.loop.work_once() <= 60


async def test_every_request_has_a_nonce_of_its_own(tmp_path: Path) -> None:
    nonces = []

    def note(request: httpx.Request) -> httpx.Response:
        nonces.append(request.headers["x-muster-nonce"])
        return httpx.Response(503)

    async with facing(tmp_path, note) as (desk, liar):
        await run_until(desk.loop, lambda: liar.leases >= 8)
    assert len(set(nonces)) == len(nonces) >= 8


async def test_a_clock_that_jumps_is_in_the_very_next_request() -> None:
    issued: list[int] = []
    clock = iter([NOW, NOW + 3600, NOW + 3601, NOW + 3602])

    def note(request: httpx.Request) -> httpx.Response:
        issued.append(int(request.headers["x-muster-issued-at"]))
        return httpx.Response(503 if len(issued) < 3 else 204)

    async with OrchestratorApi(
        "http://orchestrator.test",
        key=NODE_KEY,
        domain=DOMAIN,
        audience=address_of(ORCHESTRATOR_KEY),
        transport=httpx.MockTransport(note),
        clock=lambda: next(clock),
        backoff_s=0.0,
    ) as api:
        await api.lease(HONEST.run_id)
    assert issued == [NOW, NOW + 3600, NOW + 3601]
