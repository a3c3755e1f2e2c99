"""Replays against the code of both sides: the orchestrator's memory of nonces, and the client's
check of answers.
"""

import asyncio
import contextlib
import tempfile
from pathlib import Path
from random import Random

import httpx

from muster.api import OrchestratorApi
from muster.api.signing import EMPTY_BODY_HASH, REQUEST_VALIDITY_S, SignedHeaders
from muster.lab.redteam.stage import DOMAIN, NODE, NOW, ORCHESTRATOR
from muster.lab.redteam.trials import Outcome
from muster.orchestrator.db import open_database
from muster.orchestrator.db.group import GroupCommit
from muster.orchestrator.http.signers import NonceStore
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32


async def send_twice(folder: Path, random: Random) -> Outcome:
    """Use one nonce twice while its request is valid; sometimes with a restart between."""
    clock = [float(NOW)]
    headers = SignedHeaders(
        address_of(NODE), Hash32(random.randbytes(32)), NOW, EMPTY_BODY_HASH, bytes(65)
    )
    with tempfile.TemporaryDirectory(dir=folder) as place:
        database = await open_database(Path(place) / "nonces.sqlite3")
        group = GroupCommit(database)
        writing = asyncio.create_task(group.run())
        try:
            store = NonceStore(database, group, clock=lambda: clock[0])
            store.take(headers)
            await store.keep(headers)
            if random.random() < 0.5:
                store = NonceStore(database, group, clock=lambda: clock[0])
                await store.load()
            clock[0] += random.choice((0, 1, REQUEST_VALIDITY_S - 1, REQUEST_VALIDITY_S))
            try:
                store.take(headers)
                await store.keep(headers)
            except ApiError as error:
                return Outcome(error.code == "nonce_reused", "REFUSED", error.code)
            return Outcome(False, "TAKEN")
        finally:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing
            await database.close()


async def fetch_file(name: Hash32, served: bytes) -> Outcome:
    """Ask for a file, and let the server answer with another."""

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=served)

    async with OrchestratorApi(
        "http://orchestrator.test",
        key=NODE,
        domain=DOMAIN,
        audience=address_of(ORCHESTRATOR),
        transport=httpx.MockTransport(answer),
    ) as api:
        try:
            await api.file(name)
        except ApiError as error:
            return Outcome("hashes to something else" in str(error), "REFUSED", error.code)
    return Outcome(False, "TAKEN")
