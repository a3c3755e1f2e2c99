"""The owner's socket: off by default, for one user, and not reachable over the network."""

import asyncio
import json
import logging
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from orchestrator_bench import Bench, client, served
from orchestrator_fakes import RUN

from muster.api import Lease, NoWork
from muster.orchestrator.admin import admin_listener, create_admin_app
from muster.orchestrator.cli import orchestrator
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError, ConfigError

pytestmark = pytest.mark.sqlite_only

Order = Callable[..., Any]


def order(path: Path, *words: str) -> Any:
    """Run a command of the owner; return its output."""
    result = CliRunner().invoke(orchestrator, ["admin", "--socket", str(path), *words])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.output)


async def test_owner_pauses_and_resumes_leases(tmp_path: Path) -> None:
    path = tmp_path / "owner"
    async with (
        served(tmp_path, admin_socket=path) as (bench, url),
        client(bench, url, bench.network.keys.nodes[0]) as api,
    ):
        assert (await asyncio.to_thread(order, path, "pause"))["leases_are_paused"] is True
        refused = await api.lease(RUN)
        assert isinstance(refused, NoWork)
        assert refused.reason == "paused"
        assert (await asyncio.to_thread(order, path, "counters"))["leases_are_paused"] is True
        await asyncio.to_thread(order, path, "resume")
        assert isinstance(await api.lease(RUN), Lease)
        assert (await asyncio.to_thread(order, path, "counters"))["open_leases"] == 1


async def test_owner_drops_a_lease_and_the_node_gets_another(tmp_path: Path) -> None:
    path = tmp_path / "owner"
    async with (
        served(tmp_path, admin_socket=path) as (bench, url),
        client(bench, url, bench.network.keys.nodes[0]) as api,
    ):
        node = address_of(bench.network.keys.nodes[0])
        first = await api.lease(RUN)
        assert isinstance(first, Lease)
        assert await asyncio.to_thread(order, path, "drop-lease", node) == {"dropped": 1}
        assert await asyncio.to_thread(order, path, "drop-lease", node) == {"dropped": 0}
        second = await api.lease(RUN)
        assert isinstance(second, Lease)
        assert second.ticket.index != first.ticket.index


async def test_owner_rebuilds_changes_the_log_level_and_collects(tmp_path: Path) -> None:
    path, level = tmp_path / "owner", logging.getLogger().level
    async with served(tmp_path, admin_socket=path) as (bench, _):
        await bench.upload()
        while bench.services.projection.batch_counts != (1, 0):
            await asyncio.sleep(0.01)
        rebuilt = await asyncio.to_thread(order, path, "rebuild")
        assert rebuilt == {"batches_committed": 1, "batches_judged": 0}
        try:
            assert await asyncio.to_thread(order, path, "log-level", "DEBUG")
            assert logging.getLogger().level == logging.DEBUG
        finally:
            logging.getLogger().setLevel(level)
        with pytest.raises(ApiError, match="kept for ever"):
            await asyncio.to_thread(order, path, "collect")
    again = tmp_path / "again"
    again.mkdir()
    async with served(again, admin_socket=path, retention_s=10) as (_, _):
        assert await asyncio.to_thread(order, path, "collect") == {"dropped": 0}


async def test_socket_is_its_users_alone_and_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "owner"
    async with served(tmp_path, admin_socket=path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    with pytest.raises(ApiError, match="no orchestrator listens"):
        order(path, "counters")


async def test_nothing_of_it_is_in_the_public_application(bench: Bench) -> None:
    assert OrchestratorSettings(run=1, keystore=Path("k")).admin_socket is None
    admin = create_admin_app(bench.services).openapi()["paths"]
    assert len(admin) == 7
    async with bench.http() as http:
        for path, methods in admin.items():
            for method in methods:
                answer = await http.request(method, path.replace("{node}", "0x" + "11" * 20))
                assert answer.status_code == 404
    assert not any(path.startswith("/admin") for path in bench.app.openapi()["paths"])


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "owner"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with admin_listener(path) as listener:
        assert listener.getsockname() == str(path)


def test_socket_of_another_process_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "owner"
    with (
        admin_listener(path),
        pytest.raises(ConfigError, match="another process"),
        admin_listener(path),
    ):
        pass


@pytest.mark.parametrize("place", ["file", "long" * 60, "missing/owner"])
def test_path_that_cannot_be_a_socket_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(ConfigError, match=r"not a socket|cannot listen"),
        admin_listener(tmp_path / place),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"
