"""An orchestrator in process with a fake chain, for the tests to drive."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from orchestrator_fakes import NOW, RUN, Network, submission_for

from muster.api import Lease, NoWork, OrchestratorApi
from muster.api.routes import Signer
from muster.api.signing import sign_request
from muster.orchestrator import loop
from muster.orchestrator.clock import Backoff, BlockClock
from muster.orchestrator.db import open_database
from muster.orchestrator.http.app import create_app
from muster.orchestrator.process import serve_until_stopped
from muster.orchestrator.services import Services
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32
from muster.protocol.messages import Reason, Submission, Verdict
from muster.protocol.schedule import batch_seed, order_of_batch


class Wall:
    """A wall clock that tests move."""

    def __init__(self) -> None:
        self.time = float(NOW)

    def __call__(self) -> float:
        return self.time


UNLIMITED = {
    "rate_per_host": 1e6,
    "rate_per_signer": 1e6,
    "bytes_per_host": 1e12,
    "bytes_per_signer": 1e12,
}
"""Settings of an orchestrator that slows nobody down."""


@dataclass
class Bench:
    """An orchestrator in process over a fake chain, driven step by step."""

    network: Network
    services: Services
    app: FastAPI
    wall: Wall
    backoff: Backoff

    def api(self, key: bytes | None = None) -> OrchestratorApi:
        return OrchestratorApi(
            "http://orchestrator.test",
            key=key,
            domain=self.network.domain,
            audience=self.services.audience,
            transport=httpx.ASGITransport(self.app),
            clock=self.wall,
        )

    def node(self, number: int = 0) -> OrchestratorApi:
        return self.api(self.network.keys.nodes[number])

    def validator(self, number: int = 0) -> OrchestratorApi:
        return self.api(self.network.keys.validators[number])

    def signed(
        self, key: bytes, method: str, path: str, body: bytes = b"", **changes: Any
    ) -> dict[str, str]:
        """The headers of a request that an account signs now; `changes` are other signed values."""
        values: dict[str, Any] = {
            "domain": self.network.domain,
            "audience": self.services.audience,
            "nonce": Hash32(os.urandom(32)),
            "issued_at": int(self.wall()),
        }
        return sign_request(key, method=method, path=path, body=body, **(values | changes))

    def key_of(self, signer: Signer) -> bytes | None:
        """The key of an account that may sign a route's requests."""
        keys = self.network.keys
        return {
            "nobody": None,
            "node": keys.nodes[0],
            "validator": keys.validators[0],
            "trainer": keys.trainer,
            "evaluator": keys.trainer,
            "validator, trainer or juror": keys.trainer,
        }[signer]

    def http(self) -> httpx.AsyncClient:
        """A client that signs nothing."""
        return httpx.AsyncClient(base_url="http://test", transport=httpx.ASGITransport(self.app))

    async def ask(self, number: int = 0) -> Lease | NoWork:
        """Ask for a ticket as one node."""
        async with self.node(number) as api:
            return await api.lease(RUN)

    async def lease(self, number: int = 0) -> Lease:
        """Get a ticket as one node."""
        answer = await self.ask(number)
        assert isinstance(answer, Lease)
        return answer

    async def follow(self) -> None:
        await loop.follow_once(self.services, self.network.chain)

    async def commit(self) -> bool:
        done = await loop.commit_once(self.services, self.backoff)
        await self.follow()
        return done

    async def record(self) -> None:
        await loop.record_once(self.services, self.backoff)
        await self.follow()

    async def guard(self) -> None:
        await loop.guard_once(self.services, self.backoff)
        await self.follow()

    async def report(self) -> None:
        await loop.report_once(self.services, self.backoff)
        await self.follow()

    async def settle(self) -> None:
        await loop.settle_once(self.services, self.backoff)
        await self.follow()

    async def upload(
        self, number: int = 0, body: bytes = b"a file", *, units: int = 20
    ) -> Submission:
        """Lease and upload as one node."""
        lease = await self.lease(number)
        submission = submission_for(lease.ticket, body, units=units)
        async with self.node(number) as api:
            await api.submit(submission, self.network.sign_submission(submission, number), body)
        return submission

    async def judge(
        self,
        batch_id: int,
        submissions: list[Submission],
        verdict: Verdict = Verdict.ACCEPTED,
        reason: Reason = Reason.NONE,
        validators: tuple[int, ...] = (0, 1),
    ) -> bytes:
        """Hand in the same outcomes as several validators, by their places in the batch's order;
        returns the records.
        """
        root = self.network.view.batches[batch_id].root
        records = self.network.judge(submissions, verdict, reason)
        for number in [self.order(batch_id)[place] for place in validators]:
            async with self.validator(number) as api:
                signature = self.network.sign_outcomes(number, batch_id, root, records)
                await api.post_outcomes(batch_id, records, signature)
        return records

    def order(self, batch_id: int) -> list[int]:
        """The validators' numbers in the order in which they are called for a batch."""
        batch = self.network.view.batches[batch_id]
        seed = batch_seed(batch.beacon, batch.run_id, batch_id, batch.root)
        numbers = {address_of(key): n for n, key in enumerate(self.network.keys.validators)}
        seated = [v for v in self.network.run.validators if v in numbers]
        return [numbers[v] for v in order_of_batch(seed, batch.seated, seated)]

    async def run_through(self, number: int = 0, body: bytes = b"a file") -> Submission:
        """Take one submission from lease to an accepted outcome on chain."""
        submission = await self.upload(number, body)
        await self.commit()
        await self.judge(max(self.network.view.batches), [submission])
        await self.record()
        return submission

    def set_chain_time(self, time: int) -> None:
        self.network.chain.time = time
        self.services.chain_clock.update(time)


PLACES: dict[Path, str] = {}
"""Folders whose benches use a PostgreSQL database instead of a file."""


def delete_database(folder: Path) -> None:
    """Delete the rows and tables of the benches of a folder."""
    for file in folder.glob("orchestrator.sqlite3*"):
        file.unlink()
    if folder in PLACES:
        with psycopg.connect(PLACES[folder]) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")


@asynccontextmanager
async def open_bench(
    folder: Path, network: Network | None = None, *, start_s: int = 0, **settings: Any
) -> AsyncIterator[Bench]:
    """Start an orchestrator over `folder`; a second one over the same folder is a restart."""
    network, wall = network or Network(), Wall()
    wall.time += start_s
    values = {
        "run": RUN,
        "keystore": folder / "unused",
        "files": folder / "files",
        "database": PLACES.get(folder, folder / "orchestrator.sqlite3"),
        "lease_s": 60,
    }
    chain_clock = BlockClock(monotonic=lambda: 0.0)
    chain_clock.update(network.chain.time)
    built = OrchestratorSettings(**(values | settings))
    database = await open_database(built.database)
    try:
        services = await Services(
            built,
            chain=network.chain,
            view=network.view,
            key=network.keys.orchestrator,
            documents=network.documents,
            database=database,
            clock=wall,
            chain_clock=chain_clock,
        ).load()
        async with asyncio.TaskGroup() as tasks:
            group = tasks.create_task(services.group.run())
            # Failures are retried at once: tests drive every step themselves.
            backoff = Backoff(first_s=0.0)
            yield Bench(network, services, create_app(services), wall, backoff)
            group.cancel()
    finally:
        await database.close()


@asynccontextmanager
async def served(
    tmp_path: Path, *, patience_s: float = 20, **settings: Any
) -> AsyncIterator[tuple[Bench, str]]:
    """A listening orchestrator and its URL; leaving stops it with SIGTERM."""
    ready = tmp_path / "ready"
    # The flow runs a writer of its own; the bench's must not run beside it.
    async with (
        open_bench(
            tmp_path, port=0, ready_file=ready, commit_interval_s=0.01, poll_s=0.01, **settings
        ) as bench,
        asyncio.timeout(patience_s),
    ):
        process = asyncio.create_task(serve_until_stopped(bench.services, bench.network.chain))
        while not ready.exists():
            assert not process.done(), process.exception()
            await asyncio.sleep(0.01)
        try:
            yield bench, ready.read_text().strip()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            started = time.monotonic()
            await process
            assert time.monotonic() - started < 15


def client(bench: Bench, url: str, key: bytes) -> OrchestratorApi:
    return OrchestratorApi(
        url, key=key, domain=bench.network.domain, audience=bench.services.audience,
        clock=bench.wall,
    )  # fmt: skip


async def committed(bench: Bench) -> tuple[Submission, Hash32, bytes]:
    """A batch of one: the submission, the root, honest records."""
    submission = await bench.upload()
    await bench.commit()
    records = bench.network.judge([submission])
    return submission, bench.network.view.batches[1].root, records


async def hand_in(
    bench: Bench, records: bytes, signature: bytes, *, validator: int = 0, batch_id: int = 1
) -> None:
    async with bench.validator(validator) as api:
        await api.post_outcomes(batch_id, records, signature)


async def refused(call: Awaitable[object]) -> tuple[int, str]:
    """Return the status and the code with which a call is refused."""
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value.status, caught.value.code


async def refusal(bench: Bench, *arguments: Any, **options: Any) -> tuple[int, str]:
    return await refused(hand_in(bench, *arguments, **options))


async def judged(bench: Bench, verdict: Verdict) -> Submission:
    """Have one submission committed, judged and recorded."""
    submission = await bench.upload()
    await bench.commit()
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.WRONG_SEED
    await bench.judge(1, [submission], verdict, reason)
    await bench.record()
    return submission
