"""One process of the broadcast benchmark: origin, relay or client. Speaks JSON lines on stdio.

    python -m benchmarks.shardcast.shardcast_node origin FOLDER SIGNER_KEY
    python -m benchmarks.shardcast.shardcast_node relay FOLDER SIGNER UPSTREAM...
    python -m benchmarks.shardcast.shardcast_node client FOLDER SIGNER RELAY...

The first line out has the URL (or null). The origin publishes each path it reads from stdin. A
client and a relay write a line for every version they hold verified, with the time it was.
"""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path

from muster.protocol.eip712 import address_of
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.shardcast import ChunkStore, Fetcher, Relay, ShardServer
from muster.shardcast.trust import sign_root, trust_signer

RUN = RunId(1)


def say(**fields: object) -> None:
    """Write one line."""
    print(json.dumps(fields), flush=True)


async def origin(folder: Path, key: bytes) -> None:
    """Publish what stdin names, and serve it."""
    store = ChunkStore(folder, keep=1)
    async with ShardServer(store, HOST) as server:
        say(url=server.url)
        version = 0
        while path := (await asyncio.to_thread(sys.stdin.readline)).strip():
            version += 1
            await asyncio.to_thread(publish, store, Path(path), PolicyVersion(version), key)
            say(version=version, time_s=time.time())


def publish(store: ChunkStore, path: Path, version: PolicyVersion, key: bytes) -> None:
    """Publish one file by link: the benchmark never rewrites it."""
    store.publish(
        {"model.safetensors": path},
        run_id=RUN,
        version=version,
        stream_from=0,
        stream_to=0,
        sign=lambda root: sign_root(key, RUN, version, root),
        link=True,
    )


async def relay(folder: Path, signer: Address, upstreams: list[str]) -> None:
    """Mirror and serve."""
    store = ChunkStore(folder, keep=1)
    mirror = Relay(upstreams, store, run_id=RUN, trust=trust_signer(signer), parallel=PARALLEL)
    done = 0

    def report() -> None:
        nonlocal done
        for version in store.versions(RUN)[:1]:
            if version > done and store.is_complete(RUN, version):
                done = version
                say(version=version, time_s=time.time())

    store.on_change(report)
    async with ShardServer(store, HOST, wanted=mirror.wanted) as server:
        say(url=server.url)
        await mirror.run()


async def client(folder: Path, signer: Address, relays: list[str]) -> None:
    """Fetch every version as soon as a relay offers it."""
    async with Fetcher(relays, folder, keep=1, parallel=PARALLEL) as fetcher:
        say(url=None)
        have = PolicyVersion(-1)
        while True:
            found = await fetcher.newest(RUN, trust_signer(signer), after=have, wait_s=10)
            if found is None:
                continue
            have, root = found
            await fetcher.fetch(RUN, have, root)
            say(version=have, time_s=time.time())


PARALLEL = 4
HOST = os.environ.get("MUSTER_BENCH_HOST", "127.0.0.1")


def end_with_the_caller() -> None:
    """End when stdin does: whoever started this process has gone."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Run the role named on the command line."""
    role, folder, identity, *peers = sys.argv[1:]
    if role == "origin":
        asyncio.run(origin(Path(folder), bytes.fromhex(identity)))
        return
    threading.Thread(target=end_with_the_caller, daemon=True).start()
    if role == "relay":
        asyncio.run(relay(Path(folder), address_of(bytes.fromhex(identity)), peers))
    else:
        asyncio.run(client(Path(folder), address_of(bytes.fromhex(identity)), peers))


if __name__ == "__main__":
    main()
