"""The ready-made configuration in a real nginx with TLS."""

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import nginx_server
import pytest
import trustme
from orchestrator_bench import Bench, served
from orchestrator_fakes import RUN, submission_for

from muster.api import Lease, OrchestratorApi
from muster.api.answers import ErrorAnswer
from muster.lifecycle import free_port
from muster.protocol.errors import ApiError

CONFIGURATION = Path(__file__).parents[4] / "ops" / "nginx" / "orchestrator.conf"

pytestmark = pytest.mark.sqlite_only


@dataclass(frozen=True)
class Front:
    """An nginx with TLS before an orchestrator, and one that is down."""

    bench: Bench
    direct: str
    url: str
    plain_url: str
    trust: ssl.SSLContext

    def http(self, *, address: str = "127.0.0.1", url: str | None = None) -> httpx.AsyncClient:
        """A client with an address of its own."""
        transport = httpx.AsyncHTTPTransport(verify=self.trust, local_address=address)
        # The machine may be busy with other tests.
        return httpx.AsyncClient(base_url=url or self.url, transport=transport, timeout=60)

    def api(self, number: int) -> OrchestratorApi:
        return OrchestratorApi(
            self.url,
            key=self.bench.network.keys.nodes[number],
            domain=self.bench.network.domain,
            audience=self.bench.services.audience,
            clock=self.bench.wall,
            transport=httpx.AsyncHTTPTransport(verify=self.trust),
            backoff_s=0.01,
        )


@contextmanager
def encrypting(folder: Path, *, first: str) -> Iterator[tuple[int, int, ssl.SSLContext]]:
    """Run nginx with TLS before an orchestrator and one that is down; yields its TLS port, its
    plain port and the certificates to trust.
    """
    folder.mkdir()
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = folder / "fullchain.pem", folder / "privkey.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    tls, plain = free_port(), free_port()
    replaced = {
        "127.0.0.1:8600": first,
        "127.0.0.1:8601": f"127.0.0.1:{free_port()}",
        "listen 8643": f"listen 127.0.0.1:{tls}",
        "listen 8680": f"listen 127.0.0.1:{plain}",
        "/etc/muster/tls/fullchain.pem": f'"{chain}"',
        "/etc/muster/tls/privkey.pem": f'"{key}"',
    }
    with nginx_server.serving(folder, CONFIGURATION, replaced):
        yield tls, plain, trust


@asynccontextmanager
async def front(folder: Path, **settings: object) -> AsyncIterator[Front]:
    async with served(folder, trusted_proxies="127.0.0.1", patience_s=120, **settings) as (
        bench,
        direct,
    ):
        first = direct.removeprefix("http://")
        with encrypting(folder / "nginx", first=first) as (tls, plain, trust):
            await nginx_server.answering(tls)
            yield Front(
                bench, direct, f"https://127.0.0.1:{tls}", f"http://127.0.0.1:{plain}", trust
            )


async def test_work_is_leased_and_uploaded_through_tls(tmp_path: Path) -> None:
    async with front(tmp_path) as nginx, nginx.api(0) as api:
        body = bytes(1 << 20)
        lease = await api.lease(RUN)
        assert isinstance(lease, Lease)
        submission = submission_for(lease.ticket, body)
        await api.submit(submission, nginx.bench.network.sign_submission(submission), body)
        assert (await api.submission_state(submission.file_hash)).state in ("received", "committed")
        async for status in api.events():
            assert status["received"] == 1
            break


async def test_certificate_of_a_stranger_is_not_trusted(tmp_path: Path) -> None:
    async with front(tmp_path) as nginx, OrchestratorApi(nginx.url, backoff_s=0.0) as api:
        with pytest.raises(ApiError, match="no answer"):
            await api.run_info(RUN)


async def test_clients_are_limited_by_their_own_address_whatever_they_claim(tmp_path: Path) -> None:
    async with front(tmp_path, rate_per_host=1.0) as nginx:
        forged = [{"x-forwarded-for": f"9.9.9.{i}"} for i in range(4)]
        async with nginx.http(address="127.0.7.1") as greedy:
            answers = [await greedy.get("/healthz", headers=headers) for headers in forged]
        assert [a.status_code for a in answers][:3] == [200, 200, 429]
        async with nginx.http(address="127.0.7.2") as other:
            assert (await other.get("/healthz")).status_code == 200
        # Past nginx, from an address that is no proxy: the header is ignored.
        async with nginx.http(address="127.0.7.3", url=nginx.direct) as direct:
            answers = [await direct.get("/healthz", headers=headers) for headers in forged]
        assert [a.status_code for a in answers][:3] == [200, 200, 429]
        # The proxy itself is believed.
        async with nginx.http(url=nginx.direct) as proxy:
            answers = [await proxy.get("/healthz", headers=headers) for headers in forged]
        assert [a.status_code for a in answers] == [200] * 4


async def test_replica_that_is_down_is_not_noticed_and_none_at_all_is_named(tmp_path: Path) -> None:
    async with front(tmp_path) as nginx, nginx.http() as http:
        for _ in range(4):
            assert (await http.get("/healthz")).text == "ok"
    nobody = f"127.0.0.1:{free_port()}"
    with encrypting(tmp_path / "alone", first=nobody) as (tls, _, trust):
        await nginx_server.answering(tls)
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{tls}", verify=trust) as http:
            answer = await http.get("/healthz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert ErrorAnswer.model_validate_json(answer.content).error.code == "overloaded"


async def test_edges_of_the_public_face(tmp_path: Path) -> None:
    async with front(tmp_path) as nginx, nginx.http() as http:
        assert (await http.get("/metrics")).status_code == 404
        answer = await http.get("/v1/runs/1")
        assert answer.headers["strict-transport-security"].startswith("max-age=")
        assert (await http.get("/v1/nothing")).json()["error"]["code"] == "route_unknown"
        large = await http.put("/v1/submissions/1/1/0", content=bytes((64 << 20) + 1))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        async with httpx.AsyncClient(base_url=nginx.plain_url) as plain:
            moved = await plain.get("/v1/runs/1")
        assert (moved.status_code, moved.headers["location"][:8]) == (308, "https://")
