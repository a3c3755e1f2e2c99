"""Honest nodes, a validator and a reader while bodies, silent sockets and streams attack together,
or pages are asked for without end.

`pytest -s` prints what was measured.
"""

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "orchestrator"))

from orchestrator_fakes import NOW, RUN, Network, submission_for
from served_process import KEYS, serving

from muster.api import Lease, OrchestratorApi
from muster.api.signing import sign_request
from muster.lab.redteam.hostile.together import ask_once, body, hold, silence, stream
from muster.protocol.eip712 import address_of
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict

ROUNDS = 5
NETWORK = Network(keys=KEYS)


class Counted(httpx.AsyncHTTPTransport):
    """Every attempt counts, also a client's retries."""

    def __init__(self, host: str, tries: list[tuple[str, int, float]]) -> None:
        super().__init__(local_address=host)
        self.tries = tries

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        started, status = time.perf_counter(), 0
        try:
            answer = await super().handle_async_request(request)
            status = answer.status_code
            return answer
        finally:
            kind = request.url.path.split("/")[-1]
            self.tries.append((kind, status, time.perf_counter() - started))


async def ask_for_pages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for the dashboard again and again, each time by another query."""
    while True:
        writer.write(b"GET /?%x HTTP/1.1\r\nhost: x\r\n\r\n" % random.getrandbits(64))
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: ([0-9]+)", head)
        await reader.readexactly(int(size[1]) if size else 0)


def signed_by_stranger() -> Mapping[str, str]:
    return sign_request(
        os.urandom(32), NETWORK.domain, address_of(KEYS.orchestrator), "POST",
        "/v1/batches/1/fingerprints", nonce=Hash32(os.urandom(32)), issued_at=NOW,
        body_hash=Hash32(bytes(32)),
    )  # fmt: skip


def accepted(worker_id: int, work: Submission) -> bytes:
    return OutcomeRecord(
        worker_id, work.step, work.index, work.policy_version, work.file_hash,
        work.rollouts, work.units, Verdict.ACCEPTED, Reason.NONE,
    ).to_bytes()  # fmt: skip


async def honest(url: str, tries: list[tuple[str, int, float]]) -> int:
    """Work as three nodes and a validator, each request on a connection of its own."""
    done: set[tuple[int, int]] = set()
    ids: dict[str, int] = {}

    def api(key: bytes, host: str) -> OrchestratorApi:
        return OrchestratorApi(
            url, key=key, domain=NETWORK.domain, audience=address_of(KEYS.orchestrator),
            transport=Counted(host, tries), clock=lambda: NOW,
        )  # fmt: skip

    for number in range(ROUNDS):
        for n, key in enumerate(KEYS.nodes):
            async with api(key, f"127.9.{n}.1") as node:
                await node.heartbeat(
                    RUN, policy_version=PolicyVersion(0), state="idle", software="muster"
                )
            async with api(key, f"127.9.{n}.1") as node:
                lease = await node.lease(RUN)
                if isinstance(lease, Lease):
                    ids[lease.ticket.worker] = n + 1
                    content = b"file %d" % number
                    submission = submission_for(lease.ticket, content + bytes([n]))
                    signature = NETWORK.sign_submission(submission, n)
                    await node.submit(submission, signature, content + bytes([n]))
        for n, key in enumerate(KEYS.validators):
            async with api(key, f"127.8.{n}.1") as seat:
                for batch_id in await seat.called():
                    if (n, batch_id) in done:
                        continue
                    contents = await seat.batch(batch_id)
                    work = [entry.submission for entry in contents.submissions]
                    records = b"".join(accepted(ids[each.worker], each) for each in work)
                    sign = NETWORK.sign_outcomes(n, batch_id, contents.root, records)
                    await seat.post_outcomes(batch_id, records, sign)
                    done.add((n, batch_id))
    return len(done)


async def test_honest_are_served_while_sockets_attack(tmp_path: Path) -> None:
    tries: list[tuple[str, int, float]] = []
    crowds = [
        (body(), [f"127.1.{n}.1" for n in range(3)], 6),
        (body(signed_by_stranger), [f"127.2.{n}.1" for n in range(3)], 6),
        (silence, [f"127.3.0.{n}" for n in range(1, 5)], 510),
        (ask_once, [f"127.4.{n // 250}.{1 + n % 250}" for n in range(500)], 2),
        (stream, [f"127.5.0.{n}" for n in range(1, 5)], 16),
    ]
    with serving(tmp_path) as (_, port):
        url = f"http://127.0.0.1:{port}"
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            attacks = [
                tasks.create_task(hold(url, attack, sources=sources, each=each))
                for attack, sources, each in crowds
            ]
            await asyncio.sleep(3)
            outcomes = await honest(url, tries)
            async with httpx.AsyncClient() as reader, reader.stream("GET", f"{url}/live") as page:
                assert page.status_code == 200
            for attack in attacks:
                attack.cancel()
    print([attack.result() for attack in attacks])  # noqa: T201
    require_served(tries)
    assert outcomes


async def test_honest_are_served_while_one_address_asks_for_pages(tmp_path: Path) -> None:
    tries: list[tuple[str, int, float]] = []
    with serving(tmp_path, workers=10_000) as (_, port):
        url = f"http://127.0.0.1:{port}"
        attack = asyncio.create_task(hold(url, ask_for_pages, sources=["127.1.0.1"], each=64))
        await asyncio.sleep(3)
        outcomes = await honest(url, tries)
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.7.0.1")
        async with httpx.AsyncClient(transport=elsewhere, timeout=60) as reader:
            assert (await reader.get(url)).status_code == 200
        attack.cancel()
        await attack
    require_served(tries)
    assert outcomes


def require_served(tries: list[tuple[str, int, float]]) -> None:
    """Fail unless 99 % of the requests were served, 99 % of them in time."""
    times = sorted(seconds for _, _, seconds in tries)
    served = sum(status in (200, 202, 204) for _, status, _ in tries) / len(tries)
    p99 = times[int(0.99 * len(times))]
    print(len(tries), f"{served:.4f}", f"p99 {p99 * 1000:.0f} ms")  # noqa: T201
    assert len(tries) >= 2 * ROUNDS
    assert served >= 0.99
    # 0.5 on a machine of its own, 2.9 beside the other tests; a request is given up after 10.
    assert p99 < 10
