"""Three orchestrators on one PostgreSQL database, behind one address, any of them killed."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from orchestrator_network import (
    NODES,
    ORCHESTRATOR,
    VALIDATORS,
    Network,
    Process,
    eventually,
    open_network,
)
from postgres_server import PostgresServer

from muster.api import Lease
from muster.api.signing import sign_request
from muster.chain import ChainView, EventReader, apply_poll
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32
from muster.protocol.messages import Reason, Submission, Verdict
from muster.protocol.schedule import batch_seed, order_of_batch

REPLICAS = 3


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with open_network(tmp_path) as opened:
        yield opened


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


class Balancer:
    """One address for several servers: each connection goes to the next one that accepts it."""

    def __init__(self) -> None:
        self.ports: dict[int, int] = {}
        self.url = ""
        self._turn = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in self.ports:
            self._turn += 1
            port = list(self.ports.values())[self._turn % len(self.ports)]
            try:
                back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))
            return
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class Cluster:
    """The replicas, and which of them are up."""

    def __init__(self, network: Network, balancer: Balancer, database: str) -> None:
        self.network, self.balancer = network, balancer
        self._replicas = [
            Process(network, database=database, ready_file=network.folder / f"ready{i}")
            for i in range(REPLICAS)
        ]

    async def start(self, number: int) -> None:
        url = await self._replicas[number].start()
        self.balancer.ports[number] = int(url.rpartition(":")[2])

    async def kill(self, number: int) -> None:
        del self.balancer.ports[number]
        await self._replicas[number].kill()

    async def leaders(self) -> list[int]:
        """The replicas that are up and say that they write to the chain."""
        found = []
        async with httpx.AsyncClient() as http:
            for number, port in self.balancer.ports.items():
                text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                if "muster_orchestrator_is_leader 1.0" in text:
                    found.append(number)
        return found

    async def has_one_leader(self) -> bool:
        return len(await self.leaders()) == 1

    async def upload(self, node: int, body: bytes) -> Submission:
        """Lease and upload through the balancer until it is acknowledged, whoever is killed."""
        network, signed = self.network, None
        while True:
            try:
                async with network.api(self.balancer.url, NODES[node]) as api:
                    if signed is None:
                        lease = await api.lease(network.run_id)
                        if not isinstance(lease, Lease):
                            await asyncio.sleep(0.1)
                            continue
                        ticket = lease.ticket
                        signed = Submission(
                            ticket.run_id, ticket.worker, ticket.step, ticket.index,
                            ticket.policy_version, file_hash(body), 4, 20,
                        )  # fmt: skip
                    signature = network.sign(signed.struct_hash(), NODES[node])
                    await api.submit(signed, signature, body)
                    return signed
            except ApiError as error:
                if error.status < 500:
                    raise
                await asyncio.sleep(0.1)

    async def calls(self, number: int, validator: int) -> dict[int, int]:
        """How many validators one replica calls for each batch, as it tells a validator."""
        url = f"http://127.0.0.1:{self.balancer.ports[number]}"
        async with self.network.api(url, VALIDATORS[validator]) as api:
            return await api.called()

    async def all_call(self, wanted: dict[int, int]) -> bool:
        """Whether every replica that is up calls exactly so many."""
        told = [await self.calls(number, 0) for number in self.balancer.ports]
        return all(calls == wanted for calls in told)

    async def judge(self, submission: Submission) -> None:
        """Hand in outcomes until they are posted; an answer to some may be lost with a replica."""
        url = self.balancer.url
        while True:
            try:
                async with asyncio.timeout(10):
                    async with self.network.api(url, VALIDATORS[0]) as api:
                        if (await api.submission_state(submission.file_hash)).state == "judged":
                            return
                    await self.network.judge(url, submission)
                    await self.network.until(url, submission, "judged")
            except (ApiError, TimeoutError):
                await asyncio.sleep(0.1)


@pytest.fixture
async def cluster(network: Network, postgres: PostgresServer) -> AsyncIterator[Cluster]:
    async with open_cluster(network, postgres) as opened:
        yield opened


@asynccontextmanager
async def open_cluster(network: Network, postgres: PostgresServer) -> AsyncIterator[Cluster]:
    balancer = Balancer()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(balancer.serving())
        cluster = Cluster(network, balancer, postgres.create())
        # All at once: they race to create the tables.
        await asyncio.gather(*(cluster.start(number) for number in range(REPLICAS)))
        yield cluster
        for number in list(balancer.ports):
            await cluster.kill(number)


async def test_nothing_is_lost_or_sent_twice_when_any_replica_is_killed(cluster: Cluster) -> None:
    await eventually(cluster.has_one_leader)
    await cluster.network.publish(*range(1, 40))

    async def kill_in_turn() -> None:
        for victim in ("other", "leader", "other", "leader"):
            await eventually(cluster.has_one_leader)
            [leader] = await cluster.leaders()
            chosen = leader if victim == "leader" else (leader + 1) % REPLICAS
            await cluster.kill(chosen)
            await cluster.start(chosen)

    submissions: list[Submission] = []

    async def work(node: int) -> None:
        while not killer.done():
            body = b"rows %d" % len(submissions)
            submissions.append(await cluster.upload(node, body + b" of %d" % node))
            await cluster.judge(submissions[-1])

    async with asyncio.timeout(240):
        killer = asyncio.create_task(kill_in_turn())
        await asyncio.gather(killer, work(0), work(1))
    network, view = cluster.network, ChainView()
    apply_poll(view, await EventReader(network.chain).poll())
    recorded = Counter(
        record.file_hash for batch in view.batches.values() for record in batch.records or ()
    )
    assert recorded == Counter({s.file_hash: 1 for s in submissions})
    roots = Counter(batch.root for batch in view.batches.values())
    assert set(roots.values()) == {1}
    await eventually(cluster.has_one_leader)


async def test_replicas_outlive_a_restart_of_the_database(
    cluster: Cluster, postgres: PostgresServer
) -> None:
    first = await cluster.upload(0, b"before")
    await cluster.judge(first)
    postgres.stop()
    with pytest.raises(ApiError) as caught:
        async with cluster.network.api(cluster.balancer.url, NODES[0]) as api:
            await api.lease(cluster.network.run_id)
    assert (caught.value.status, caught.value.code) == (503, "database_away")
    postgres.start()
    second = await cluster.upload(0, b"after")
    await cluster.judge(second)
    await eventually(cluster.has_one_leader)
    assert len(cluster.balancer.ports) == REPLICAS


async def test_request_counts_once_whichever_replica_gets_it_first(cluster: Cluster) -> None:
    network = cluster.network
    body = b'{"run_id":%d}' % network.run_id
    headers = sign_request(
        key=NODES[0],
        domain=network.chain.domain("ContributionLedger"),
        audience=address_of(ORCHESTRATOR),
        method="POST",
        path="/v1/leases",
        body=body,
        nonce=Hash32(keccak(b"a nonce")),
        issued_at=int(time.time()),
    )
    async with httpx.AsyncClient() as http:
        answers = await asyncio.gather(
            *(
                http.post(f"http://127.0.0.1:{port}/v1/leases", content=body, headers=headers)
                for port in cluster.balancer.ports.values()
                for _ in range(3)
            )
        )
    assert Counter(answer.status_code for answer in answers) == {200: 1, 401: 8}


async def test_replicas_agree_on_who_checks_and_a_killed_one_loses_no_call(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    # A deadline so long that nobody is replaced for being silent.
    async with (
        open_network(tmp_path, outcome_deadline_s=2400, validators=5) as network,
        open_cluster(network, postgres) as cluster,
    ):
        await eventually(cluster.has_one_leader)
        doubted, plain = [await commit(cluster, node, b"file %d" % node) for node in (0, 1)]
        order = {batch_id: await order_of(network, batch_id) for batch_id in (doubted, plain)}
        await eventually(lambda: cluster.all_call({doubted: 2, plain: 2}))

        # One of those called finds a fault, which nobody is told who is called and has yet to
        # speak. Once that one spoke everybody else is called, by every replica.
        first, second, *others = order[doubted]
        await sign_outcome(cluster, 0, doubted, first, Verdict.REJECTED)
        await cluster.kill(0)
        assert await cluster.all_call({doubted: 2, plain: 2})
        await sign_outcome(cluster, 1, doubted, second, Verdict.ACCEPTED)
        await eventually(lambda: cluster.all_call({doubted: 5, plain: 2}))
        await cluster.start(0)
        await eventually(lambda: cluster.all_call({doubted: 5, plain: 2}))

        # Each replica hears from one validator only; together that is enough.
        for replica, validator in zip((2, 0, 1), others, strict=True):
            await sign_outcome(cluster, replica, doubted, validator, Verdict.ACCEPTED)
        for replica, validator in zip((2, 0), order[plain], strict=False):
            await sign_outcome(cluster, replica, plain, validator, Verdict.ACCEPTED)
        await eventually(lambda: cluster.all_call({}))
        view = await read(network)
        for batch_id in (doubted, plain):
            assert [r.verdict for r in view.batches[batch_id].records or ()] == [Verdict.ACCEPTED]
        called = {address_of(VALIDATORS[number]) for number in order[plain][:2]}
        seats = view.runs[network.run_id].seats
        assert {v for v, bit in seats.items() if view.batches[plain].signers & bit} == called


async def commit(cluster: Cluster, node: int, body: bytes) -> int:
    """Upload a file; return the batch that it alone is in."""
    submission = await cluster.upload(node, body)
    state = await cluster.network.until(cluster.balancer.url, submission, "committed")
    assert state.batch_id is not None
    return state.batch_id


async def read(network: Network) -> ChainView:
    view = ChainView()
    apply_poll(view, await EventReader(network.chain).poll())
    return view


async def order_of(network: Network, batch_id: int) -> list[int]:
    """The numbers of the validators in the order in which they are called, from the chain alone."""
    view = await read(network)
    batch, seated = view.batches[batch_id], view.runs[network.run_id].validators
    seed = batch_seed(batch.beacon, batch.run_id, batch_id, batch.root)
    numbers = {address_of(key): number for number, key in enumerate(VALIDATORS)}
    return [numbers[who] for who in order_of_batch(seed, batch.seated, seated)]


async def sign_outcome(
    cluster: Cluster, replica: int, batch_id: int, validator: int, verdict: Verdict
) -> None:
    """Let a validator hand in its outcome of a batch of one to one replica."""
    network = cluster.network
    url = f"http://127.0.0.1:{cluster.balancer.ports[replica]}"
    async with network.api(url, VALIDATORS[validator]) as api:
        [entry] = (await api.batch(batch_id)).submissions
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.LATE
    await network.judge(url, entry.submission, verdict, reason, (validator,))
