"""A broadcast on this machine: a chain that knows roots, and an origin."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from shardcast_network import Network

from muster.shardcast import ShardServer


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return Network(tmp_path)


@pytest.fixture
async def origin(network: Network) -> AsyncIterator[str]:
    async with ShardServer(network.origin) as server:
        yield server.url
