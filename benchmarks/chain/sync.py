"""A first sync through a public endpoint, with repeated kills.

    make bench-sync                                        a million events, killed ten times
    make bench-sync ARGS="--events 20000 --kills 3"

 1. A real Anvil gets the contracts, and deposits into the stake vault, as in `index.py`.
 2. The reference reads them all in one go, from Anvil itself.
 3. A process of its own reads them through `muster.lab.endpoints.faults`: ranges of 500 blocks and
    10,000 logs at most, rate limits, lost answers, lagging nodes. It is killed with SIGKILL at
    random moments and restarted, and resumes from its files on disk.
 4. Both must have read the same events. The table shows how much was requested more than once.

Writes results/sync.json.
"""

import argparse
import asyncio
import hashlib
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from benchmarks.chain import index
from benchmarks.report import HERE, machine, print_table, write

from muster.app.anvil import Anvil
from muster.chain import (
    Chain,
    ChainView,
    Event,
    EventReader,
    save_deployment,
)
from muster.deploy import DeployParameters, deploy_contracts
from muster.lab.endpoints.faults import PROFILES, PublicEndpoint
from muster.lab.endpoints.proxy import RpcProxy
from muster.protocol.errors import ChainError

SEED = 20


async def main() -> None:
    """Sync, kill, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--read", metavar="URL", help="Be the process that is killed.")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--head", type=int, default=0, help="Read up to this block.")
    asked = parser.parse_args()
    if asked.read:
        print(await read(asked.read, asked.folder, asked.head), flush=True)
        return
    index.EVENTS, index.OWNERS = asked.events, asked.events // index.PER_OWNER
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        async with Anvil(block_time_s=Anvil.STILL_S) as anvil:
            deployment = await deploy_contracts(anvil.rpc_url, index.KEY, DeployParameters())
            save_deployment(Path(folder), deployment)
            async with await Chain.connect(anvil.rpc_url, deployment, key=index.KEY) as chain:
                began = time.perf_counter()
                await index.deposit_all(chain)
                print(f"{asked.events} deposits made in {time.perf_counter() - began:.0f} s")
                head = await chain.block_number()
            began = time.perf_counter()
            true = await read(anvil.rpc_url, Path(folder), head, keeps=False)
            direct_s = time.perf_counter() - began
            endpoint = PublicEndpoint(PROFILES["public"], SEED)
            async with RpcProxy(anvil.rpc_url, endpoint) as proxy:
                began = time.perf_counter()
                killed, said = await killed_again_and_again(proxy, Path(folder), head, asked)
                wall_s = time.perf_counter() - began
    assert said == true, f"{said} instead of {true}"
    print_table(
        "A first sync, undisturbed and killed",
        ("", "wall s", "blocks", "requests for logs"),
        [
            ("from the chain", f"{direct_s:.1f}", str(head), ""),
            (
                f"public endpoint, killed {killed} times",
                f"{wall_s:.1f}",
                "",
                str(proxy.asked["eth_getLogs"]),
            ),
        ],
    )
    print(", ".join(f"{times} {name}" for name, times in sorted(endpoint.played.items())))
    print(f"the same {said}")
    if asked.events == 1_000_000:
        detail = {"direct_s": direct_s, "kills": killed, "played": endpoint.played}
        write("sync", {"sync_1m_killed_s": wall_s}, detail, measured_on=machine())


async def killed_again_and_again(
    proxy: RpcProxy, folder: Path, head: int, asked: argparse.Namespace
) -> tuple[int, str]:
    """Return the number of kills before a sync was done, and a digest of its events."""
    chance, killed = Random(SEED), 0
    while True:
        child = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "benchmarks.chain.sync",
                "--read",
                proxy.url,
                "--folder",
                str(folder),
            ),
            *("--head", str(head)),
            cwd=HERE.parent,
            stdout=asyncio.subprocess.PIPE,
        )
        done = asyncio.ensure_future(child.communicate())
        # A killed process must not need all requests again.
        portion = asked.events // 10_000 // asked.kills
        last = proxy.asked["eth_getLogs"] + chance.randint(1, max(1, portion))
        while killed < asked.kills and not done.done() and proxy.asked["eth_getLogs"] < last:
            await asyncio.sleep(0.002)
        if killed < asked.kills and not done.done():
            child.kill()
            killed += 1
            print(f"killed {killed} times")
        output, _ = await done
        if child.returncode == 0:
            return killed, output.decode().strip()


async def read(url: str, folder: Path, head: int, *, keeps: bool = True) -> str:
    """Read all events despite faults; return a digest of them.

    A node that lags ends before the head; the next poll goes on.
    """
    async with await connected(url, folder) as chain:
        # Those of a development chain are not kept otherwise.
        chain.log_file = folder / "logs.sqlite" if keeps else None
        reader, view, at = EventReader(chain), ChainView(), 0
        events: list[Event] = []
        while at < head:
            try:
                poll = await reader.poll()
                assert poll.rewound_to is None
                events, at = events + poll.events, poll.head.number
            except ChainError as error:
                print(f"again: {error}", file=sys.stderr)
    digest = hashlib.sha256()
    for event in events:
        view.apply(event)
        digest.update(repr((event.block_number, event.log_index, event.args)).encode())
    assert view.contradictions == []
    return f"{len(events)} events of {len(view.stakes)} owners, {digest.hexdigest()[:16]}"


async def connected(url: str, folder: Path) -> Chain:
    """Connect, whatever the endpoint does."""
    while True:
        try:
            return await Chain.connect(url, folder)
        except ChainError as error:
            print(f"again: {error}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
