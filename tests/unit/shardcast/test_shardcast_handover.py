"""A trainer's origin stays until relays hold the last version whole."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shardcast_policies import RUN, SIGNATURE, fill, publish

from muster.protocol.errors import ApiError
from muster.protocol.ids import PolicyVersion
from muster.shardcast import ChunkStore, ShardServer
from muster.trainer.publish.publisher import hand_over, without

LAST = PolicyVersion(2)
NOBODY = "http://127.0.0.1:9"


class Orchestrator:
    """Names relays, or does not answer."""

    def __init__(self, *relays: str, error: ApiError | None = None) -> None:
        self._relays, self._error = list(relays), error

    async def run_info(self, _run_id: int) -> Any:
        if self._error:
            raise self._error
        return SimpleNamespace(relays=self._relays)


async def hand(api: Any, within_s: float) -> None:
    await hand_over(api, RUN, LAST, within_s=within_s)


async def test_it_stays_until_the_last_relay_holds_the_version_whole(tmp_path: Path) -> None:
    origin, quick, slow = (ChunkStore(tmp_path / name) for name in ("origin", "quick", "slow"))
    manifest = publish(origin, {"f": b"last"}, LAST)
    for store in (quick, slow):
        store.begin(manifest, SIGNATURE)
    await asyncio.to_thread(fill, quick, origin, manifest)
    async with ShardServer(quick) as first, ShardServer(slow) as second:
        handing = asyncio.create_task(hand(Orchestrator(first.url, second.url), 10))
        await asyncio.wait([handing], timeout=0.3)
        assert not handing.done()
        await asyncio.to_thread(fill, slow, origin, manifest)
        async with asyncio.timeout(5):
            await handing


async def test_time_is_up_and_it_says_who_lacks_the_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ChunkStore(tmp_path)
    publish(store, {"f": b"older"}, LAST - 1)
    async with ShardServer(store) as server:
        url = server.url
        assert await without([url, NOBODY], RUN, LAST, within_s=0.1) == [url, NOBODY]
        await hand(Orchestrator(url), 0.1)
    assert vars(caplog.records[-1])["relays"] == url
    assert "lack the last version" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("api", "said"),
    [
        (Orchestrator(), "no relay mirrors the run"),
        (
            Orchestrator(error=ApiError("away", status=503, code="unreachable")),
            "cannot ask the orchestrator",
        ),
    ],
)
async def test_nobody_is_waited_for_whom_nobody_names(
    api: Orchestrator, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(5):
            await hand(api, 3600)
    assert said in caplog.messages[-1]
