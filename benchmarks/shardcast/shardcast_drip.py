"""A fetch beside eight relays that drip, over the same without them: 48 MB, emulated links.

    python -m benchmarks.shardcast.shardcast_drip [--mb 48] [--drippers 8] [--repeat 3]

Everybody has a line of 100 Mbit/s and 50 ms round trip, real TCP; needs root. The client knows
nothing of any relay when it starts. `--slow` gives everybody a tenth of that line. Exits with 77
where links cannot be emulated.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import machine, print_table, write
from benchmarks.shardcast.emulated_links import Link, Network

from muster.lab.redteam.hostile.dripping import DrippingRelay, Manner
from muster.protocol.eip712 import address_of
from muster.shardcast import ChunkStore, ShardServer, fetch, publish

KEY = bytes(31) + b"\x01"
LONGEST_S = 300.0
"""A fetch that takes longer is given up, and counts as that long."""


async def serve(folder: Path, host: str, manner: str) -> None:
    """Serve the origin's store, honestly or in a manner; writes the URL."""
    store = ChunkStore(folder)
    if manner == "honest":
        async with ShardServer(store, host) as server:
            await _say_and_stay(server.url)
    else:
        async with DrippingRelay(store, Manner(manner)).listening(host) as url:
            await _say_and_stay(url)


async def _say_and_stay(url: str) -> None:
    print(url, flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def measure(folder: Path, relays: list[str]) -> None:
    """Fetch once into a fresh folder; writes the seconds and the bytes that came."""
    started_s = time.monotonic()
    before = _received_bytes()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_S):
            await fetch(relays, folder, signer=address_of(KEY))
    print(json.dumps([time.monotonic() - started_s, _received_bytes() - before]), flush=True)


def _received_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[0]) for line in lines if "tun0:" in line)


class Stage:
    """One honest relay, drippers of one manner, and clients one after the other."""

    def __init__(self, network: Network, folder: Path, stack: contextlib.ExitStack) -> None:
        self._network = network
        self._folder = folder
        self._stack = stack

    def server(self, node: int, manner: str) -> str:
        """Start a relay; returns its URL."""
        role = ["serve", str(self._folder / "origin"), self._network.address(node), manner]
        process = self._popen(node, role)
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        return process.stdout.readline().decode().strip()

    def fetched(self, node: int, relays: list[str]) -> tuple[float, int]:
        """Return how long a fetch took, and how many bytes came."""
        with tempfile.TemporaryDirectory(dir=self._folder) as cache:
            process = self._popen(node, ["fetch", cache, *relays])
            seconds, received = json.loads(process.communicate()[0])
        return float(seconds), int(received)

    def _popen(self, node: int, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = self._network.command(
            node, [sys.executable, "-m", "benchmarks.shardcast.shardcast_drip", *arguments]
        )
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def compare(manner: Manner, options: argparse.Namespace) -> dict[str, object]:
    """Return how long fetches took without and with drippers of one manner, by turns."""
    drippers = range(1, 1 + options.drippers)
    link = Link(bytes_per_s=1.25e6 if options.slow else 12.5e6, loss=0.0)
    network = Network(2 + options.drippers, link)
    with contextlib.ExitStack() as stack:
        stack.enter_context(network.up())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = folder / "model.safetensors"
        source.write_bytes(os.urandom(round(options.mb * 1e6)))
        publish([source], folder / "origin", key=KEY)
        stage = Stage(network, folder, stack)
        honest = stage.server(0, "honest")
        hostile = [stage.server(node, manner.value) for node in drippers]
        client = 1 + options.drippers
        without, beside = [], []
        for _ in range(options.repeat):
            without.append(stage.fetched(client, [honest]))
            beside.append(stage.fetched(client, [*hostile, honest]))
    alone_s = statistics.median(seconds for seconds, _ in without)
    return {
        "manner": manner.value,
        "alone_s": [seconds for seconds, _ in without],
        "beside_s": [seconds for seconds, _ in beside],
        "ratio": statistics.median(seconds for seconds, _ in beside) / alone_s,
        "extra_bytes": max(received for _, received in beside) / (options.mb * 1e6) - 1,
    }


def main() -> None:
    """Compare every manner, print a table, and write the worst ratio of them."""
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(Path(sys.argv[2]), *sys.argv[3:]))
        return
    if sys.argv[1:2] == ["fetch"]:
        asyncio.run(measure(Path(sys.argv[2]), sys.argv[3:]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=48)
    parser.add_argument("--drippers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--manners", nargs="+", default=[manner.value for manner in Manner][1:])
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--save", action="store_true", help="write results/shardcast_drip.json")
    options = parser.parse_args()
    if reason := Network.missing():
        print(f"skipped: {reason}", file=sys.stderr)
        raise SystemExit(77)
    found = []
    for name in options.manners:
        found.append(compare(Manner(name), options))
        print(json.dumps(found[-1]), flush=True)
    rows = [[str(f["manner"]), f"{f['ratio']:.2f}", f"{f['extra_bytes']:.1%}"] for f in found]
    print_table("Beside drippers", ["manner", "ratio", "extra bytes"], rows)
    if options.save:
        worst = max(float(str(f["ratio"])) for f in found)
        write("shardcast_drip", {"drip_ratio": worst}, found, measured_on=machine())


if __name__ == "__main__":
    main()
