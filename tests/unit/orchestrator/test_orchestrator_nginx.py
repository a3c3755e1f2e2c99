"""The ready-made configuration in a real nginx with TLS, where one is installed."""

from __future__ import annotations

import asyncio
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from orchestrator_bench import Bench
from orchestrator_fakes import RUN, submission_for
from test_orchestrator_server import served

from muster.api import Lease, OrchestratorApi
from muster.api.answers import ErrorAnswer
from muster.lifecycle.ports import free_port
from muster.protocol.errors import ApiError

CONFIGURATION = Path(__file__).parents[3] / "ops" / "nginx" / "orchestrator.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
OPENSSL = shutil.which("openssl")

pytestmark = [
    pytest.mark.sqlite_only,
    pytest.mark.skipif(not (NGINX and OPENSSL), reason="needs nginx and openssl"),
]


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


def certificate(folder: Path) -> tuple[Path, Path]:
    chain, key = folder / "fullchain.pem", folder / "privkey.pem"
    assert OPENSSL is not None
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return chain, key


def start_nginx(folder: Path, ports: dict[str, str]) -> subprocess.Popen[bytes]:
    text = CONFIGURATION.read_text()
    for old, new in ports.items():
        assert old in text
        text = text.replace(old, new)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{text}}}\n"
    )
    assert NGINX is not None
    return subprocess.Popen(
        [
            NGINX,
            "-p",
            str(folder),
            "-c",
            str(folder / "nginx.conf"),
            "-e",
            str(folder / "error.log"),
        ]
    )


@asynccontextmanager
async def front(folder: Path, **settings: object) -> AsyncIterator[Front]:
    nginx_folder = folder / "nginx"
    nginx_folder.mkdir()
    chain, key = certificate(nginx_folder)
    tls, plain, down = free_port(), free_port(), free_port()
    async with served(folder, trusted_proxies="127.0.0.1", patience_s=120, **settings) as (
        bench,
        direct,
    ):
        process = start_nginx(
            nginx_folder,
            {
                "127.0.0.1:8600": direct.removeprefix("http://"),
                "127.0.0.1:8601": f"127.0.0.1:{down}",
                "listen 8643": f"listen 127.0.0.1:{tls}",
                "listen 8680": f"listen 127.0.0.1:{plain}",
                "/etc/muster/tls/fullchain.pem": str(chain),
                "/etc/muster/tls/privkey.pem": str(key),
            },
        )
        try:
            await answering(tls)
            trust = ssl.create_default_context(cafile=str(chain))
            yield Front(
                bench, direct, f"https://localhost:{tls}", f"http://localhost:{plain}", trust
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=10)


async def answering(port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return


async def test_work_is_leased_and_uploaded_through_tls(tmp_path: Path) -> None:
    async with front(tmp_path) as nginx, nginx.api(0) as api:
        body = bytes(4 << 20)
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
        # Past nginx, from an address that is no proxy: the header says nothing.
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
    (tmp_path / "alone").mkdir()
    chain, key = certificate(tmp_path / "alone")
    tls = free_port()
    process = start_nginx(
        tmp_path / "alone",
        {
            "127.0.0.1:8600": f"127.0.0.1:{free_port()}",
            "127.0.0.1:8601": f"127.0.0.1:{free_port()}",
            "listen 8643": f"listen 127.0.0.1:{tls}",
            "listen 8680": f"listen 127.0.0.1:{free_port()}",
            "/etc/muster/tls/fullchain.pem": str(chain),
            "/etc/muster/tls/privkey.pem": str(key),
        },
    )
    try:
        await answering(tls)
        trust = ssl.create_default_context(cafile=str(chain))
        async with httpx.AsyncClient(base_url=f"https://localhost:{tls}", verify=trust) as http:
            answer = await http.get("/healthz")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)
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
