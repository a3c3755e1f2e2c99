"""The ready-made configuration in a real nginx."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import nginx_server
import pytest
from shardcast_network import RUN, Network, TwistedRelay, honest, policy

from muster.lifecycle import Proxies, free_port
from muster.protocol.ids import PolicyVersion
from muster.shardcast import ServerLimits, ShardServer

CONFIGURATION = Path(__file__).parents[3] / "ops" / "nginx" / "shardcast.conf"


@pytest.fixture
def relay(network: Network) -> TwistedRelay:
    return TwistedRelay(network.origin, honest)


@asynccontextmanager
async def before(url: str, folder: Path) -> AsyncIterator[str]:
    """Nginx with our configuration before a relay; yields its URL."""
    port = free_port()
    replaced = {
        "127.0.0.1:8700": url.removeprefix("http://"),
        "listen 8780": f"listen 127.0.0.1:{port}",
        "proxy_cache_path cache": f'proxy_cache_path "{folder}/cache"',
    }
    with nginx_server.serving(folder, CONFIGURATION, replaced):
        await nginx_server.answering(port)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def front(tmp_path: Path, relay: TwistedRelay) -> AsyncIterator[str]:
    async with relay.listening() as url, before(url, tmp_path / "nginx") as fronted:
        yield fronted


async def test_version_is_fetched_through_nginx(network: Network, front: str) -> None:
    network.publish(0, policy(0))
    async with network.fetcher(front) as client:
        assert await network.fetch(client, 0) == policy(0)


async def test_chunk_is_asked_of_the_relay_once_for_all_clients(
    network: Network, relay: TwistedRelay, front: str
) -> None:
    manifest = network.publish(0, policy(0))
    for i in range(3):
        async with network.fetcher(front, name=f"client-{i}") as client:
            assert await network.fetch(client, 0) == policy(0)
    assert relay.chunks_asked == len({span.digest for span in manifest.spans()})


async def test_cached_chunk_outlives_the_relay(
    network: Network, relay: TwistedRelay, front: str
) -> None:
    manifest = network.publish(0, policy(0))
    digest = next(iter(manifest.spans())).digest
    async with httpx.AsyncClient(base_url=front) as http:
        first = await http.get(f"/v1/chunks/{digest.hex()}")

        async def fail(_path: str, _answer: bytes | None) -> bytes | None:
            raise ConnectionAbortedError

        relay.twist = fail
        second = await http.get(f"/v1/chunks/{digest.hex()}")
        part = await http.get(f"/v1/chunks/{digest.hex()}", headers={"Range": "bytes=1-3"})
    assert (first.headers["X-Cache"], second.headers["X-Cache"]) == ("MISS", "HIT")
    assert first.content == second.content
    assert (part.status_code, part.content) == (206, first.content[1:4])


async def test_new_version_is_seen_at_once_through_nginx(network: Network, front: str) -> None:
    network.publish(0, policy(0))
    async with httpx.AsyncClient(base_url=front) as http:
        assert (await http.get(f"/v1/{RUN}/versions")).json() == {"versions": [0]}
        network.publish(1, policy(1))
        assert (await http.get(f"/v1/{RUN}/versions")).json() == {"versions": [1, 0]}
        manifest = await http.get(f"/v1/{RUN}/1/manifest")
    assert manifest.content == network.origin.manifest_bytes(RUN, PolicyVersion(1))


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/chunks/", "/v1/../etc/passwd"])
async def test_nginx_passes_on_nothing_else(
    network: Network, relay: TwistedRelay, front: str, path: str
) -> None:
    async with httpx.AsyncClient(base_url=front) as http:
        assert (await http.get(path)).status_code == 404
    assert relay.asked == []


async def test_relay_limits_the_clients_of_nginx_whatever_they_claim(
    network: Network, tmp_path: Path
) -> None:
    limits = ServerLimits(requests_per_s=0.001, burst=2, proxies=Proxies("127.0.0.1"))
    async with (
        ShardServer(network.origin, limits=limits) as server,
        before(server.url, tmp_path / "nginx") as url,
    ):
        found = []
        for client in ("127.0.7.1", "127.0.7.2"):
            transport = httpx.AsyncHTTPTransport(local_address=client)
            async with httpx.AsyncClient(base_url=url, transport=transport) as http:
                claims = [{"X-Forwarded-For": f"9.9.9.{i}"} for i in range(3)]
                found += [(await http.get("/healthz", headers=each)).status_code for each in claims]
    assert found == [200, 200, 429] * 2
