"""All attacks on an orchestrator and its validators at once: by strangers, and by one of its nodes.

Strangers send bodies that never end, hold silent connections and listen to events. The node also
sends such bodies, messages that PostgreSQL cannot store, and files that are expensive to read.

Each attack on sockets runs until it is cancelled, reopens connections that the server closes, and
counts its actions. If sources are given, connections come from addresses of 127.0.0.0/8.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

import httpx

from muster.api import Lease, OrchestratorApi
from muster.lab.redteam.hostile.bad_files import bad_files
from muster.lab.redteam.hostile.service import Door
from muster.protocol.eip712 import digest, sign
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ApiError
from muster.protocol.messages import Submission

AGAIN_S = 0.2
"""Pause between two messages of the node."""
FIRST_ANSWER_S = 30.0
"""Seconds by which the attacks are extended if a busy machine has not answered the node yet."""
FILES = 8
"""Number of bad files that the node delivers."""
FILE_VALUES = 7_500_000
"""Values of a row in files with too many."""
PATH = "/v1/batches/1/fingerprints"
"""Path to which bodies are sent."""


def attack(door: Door, key: bytes, seconds: float) -> Mapping[str, int]:
    """Attack for some seconds, with requests signed by the node's key if that helps; return counts
    by attack and answer. Runs in a process of its own.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 16), most))
    files = list(bad_files(FILE_VALUES).values())[:FILES]
    return asyncio.run(_attack(door, key, seconds, files))


async def _attack(door: Door, key: bytes, seconds: float, files: list[bytes]) -> dict[str, int]:
    whole = bytes(8 << 20)

    def by_node() -> Mapping[str, str]:
        return door.signed(key, "POST", PATH, whole, now=time.time)

    def by_stranger() -> Mapping[str, str]:
        return door.signed(os.urandom(32), "POST", PATH, whole, now=time.time)

    crowds: dict[str, tuple[Attack, list[str], int]] = {
        "bodies without signature": (body(), _sources(1, 4), 5),
        "bodies of strangers": (body(by_stranger), _sources(2, 4), 5),
        "bodies of the node": (body(by_node), _sources(3, 4), 5),
        "silent connections": (silence, _sources(4, 4), 510),
        "one request, then silence": (ask_once, _sources(5, 250), 2),
        "event streams": (stream, _sources(6, 4), 16),
    }
    running: dict[str, Awaitable[Counter[str]]] = {
        name: hold(door.url, what, sources=sources, each=each)
        for name, (what, sources, each) in crowds.items()
    }
    spoilt, delivered = Counter[str](), Counter[str]()
    running["messages that cannot be stored"] = _spoil(door, key, spoilt)
    running["bad files"] = _deliver(door, key, files, delivered)
    tasks = {name: asyncio.ensure_future(each) for name, each in running.items()}
    await asyncio.wait(tasks.values(), timeout=seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_ANSWER_S):
            while not (spoilt and delivered):
                await asyncio.sleep(AGAIN_S)
    for task in tasks.values():
        task.cancel()
    counts = await asyncio.gather(*tasks.values())
    return {
        f"{name}: {what}": number
        for name, count in zip(tasks, counts, strict=True)
        for what, number in count.items()
    }


def _sources(network: int, addresses: int) -> list[str]:
    return [f"127.66.{network}.{1 + number}" for number in range(addresses)]


async def _spoil(door: Door, key: bytes, counts: Counter[str]) -> Counter[str]:
    """Send heartbeats with a string that PostgreSQL cannot store, until cancelled."""
    said = {"run_id": door.run_id, "policy_version": 0, "state": "idle", "software": "\0"}
    message, path = json.dumps(said).encode(), "/v1/heartbeat"
    with contextlib.suppress(asyncio.CancelledError):
        async with httpx.AsyncClient(base_url=door.url, timeout=5) as http:
            while True:
                headers = door.signed(key, "POST", path, message, now=time.time)
                with contextlib.suppress(httpx.HTTPError):
                    answer = await http.post(path, content=message, headers=headers)
                    counts[str(answer.status_code)] += 1
                await asyncio.sleep(AGAIN_S)
    return counts


async def _deliver(
    door: Door, key: bytes, files: list[bytes], counts: Counter[str]
) -> Counter[str]:
    """Take tickets and fill each with a bad file, until cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        async with OrchestratorApi(
            door.url, key=key, domain=door.domain, audience=door.audience
        ) as api:
            while True:
                try:
                    answer = await api.lease(door.run_id)
                    if isinstance(answer, Lease):
                        data = files[counts["delivered"] % len(files)]
                        await _submit(api, door, key, answer, data)
                        counts["delivered"] += 1
                    else:
                        counts["no ticket"] += 1
                except ApiError as error:
                    counts[str(error.code)] += 1
                await asyncio.sleep(AGAIN_S)
    return counts


async def _submit(api: OrchestratorApi, door: Door, key: bytes, lease: Lease, data: bytes) -> None:
    ticket = lease.ticket
    claim = Submission(
        run_id=ticket.run_id,
        worker=ticket.worker,
        step=ticket.step,
        index=ticket.index,
        policy_version=ticket.policy_version,
        file_hash=file_hash(data),
        rollouts=1,
        units=1,
    )
    await api.submit(claim, sign(digest(door.domain, claim.struct_hash()), key), data)


# ------------------------------------------------------------- sockets that take places

LARGEST = 8 << 20
"""Size in bytes of the largest message body."""
TAKEN_AGAIN_S = 3.0
"""Mean pause before a lost connection is opened again."""

Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def hold(url: str, attack: Attack, *, sources: list[str], each: int) -> Counter[str]:
    """Hold `each` connections from each source until cancelled; return counts of their ends."""
    place, counts = urlsplit(url), Counter[str]()

    async def one(source: str) -> None:
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection(
                    place.hostname, place.port, local_addr=(source, 0)
                )
                counts["opened"] += 1
                await attack(reader, writer)
                while await reader.read(1 << 16):
                    pass
                counts["closed"] += 1
            except OSError:
                counts["broken"] += 1
            finally:
                if writer is not None:
                    writer.close()
            await asyncio.sleep(TAKEN_AGAIN_S * random.uniform(0.5, 1.5))

    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(one(source) for source in sources for _ in range(each)))
    return counts


def body(headers: Callable[[], Mapping[str, str]] = dict, size: int = LARGEST) -> Attack:
    """Send a body without its last byte, under the given headers, signed or not."""

    async def attack(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"{name}: {value}" for name, value in headers().items()]
        path = "/v1/batches/1/fingerprints"
        lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {size}", *lines, "", ""]
        writer.write("\r\n".join(lines).encode() + bytes(size - 1))
        await writer.drain()

    return attack


async def silence(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Send nothing."""


async def ask_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send one cheap request, then stay silent."""
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.read(1 << 16)


async def stream(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Listen to events."""
    writer.write(b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n")
