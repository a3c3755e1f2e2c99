"""Time from publish to the last verified client, beside a plain HTTP hop, cp and a peer.

    make bench-shardcast [ARGS="--sizes 64 512 --repeat 5"]

The hop is curl from a server that does nothing but sendfile, the peer shardcast 0.3.2. Every
repetition starts fresh processes, warms them up with 1 MiB, and interleaves all contestants.
Takes five to ten minutes and 16 GiB of disk; --sizes 64 512 half of that and 4 GiB.
"""

import argparse
import contextlib
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import HERE, machine, write

PEER = HERE / ".envs" / "shardcast" / "bin" / "python"
PEER_NAME = "shardcast 0.3.2, 2 relays, 2 clients"
KEY = "00" * 31 + "01"
LONGEST_S = 120.0
"""A contestant that is silent for longer than this has given up."""
PEER_FAILURES = 1
"""Further tries for the peer: sometimes one of its clients waits forever."""
MIB_OF_MANY = 512
"""Files above this are broadcast three times at most: they cost a minute each."""
TREES = {"2 relays, 2 clients": (2, 2), "3 layers of 7": (2, 4)}
"""Relays and clients below one origin; every client knows every relay."""


class Silent(Exception):
    """A node ended, or said nothing for too long; the message says which."""


class Run(NamedTuple):
    """One measured broadcast."""

    wall_s: float
    """From the call to the last verified client."""
    cpu_s: dict[str, float]
    """CPU seconds by node, its children's included."""
    rss_mb: dict[str, float]
    """Most resident memory by node, MB of 10^6 bytes."""


class Node:
    """A process that speaks JSON lines."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            bufsize=0,
        )  # fmt: skip
        self._heard = b""
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Return where it listens, or `None` as a word; waits until it is ready."""
        self._url = self._url or str(self.hear()["url"])
        return self._url

    def tell(self, line: str) -> None:
        """Write one line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def hear(self) -> dict[str, Any]:
        """Return its next line; raises Silent."""
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            if not select.select([self._process.stdout], [], [], LONGEST_S)[0]:
                raise Silent(f"the {self.name} said nothing for {LONGEST_S:.0f} s")
            if not (more := self._process.stdout.read(4096)):
                raise Silent(f"the {self.name} ended")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def hear_version(self, version: int) -> float:
        """Return the time at which it held that version."""
        while (heard := self.hear())["version"] < version:
            continue
        return float(heard["time_s"])

    def cpu_s(self) -> float:
        """Return its CPU seconds so far, with those of children that ended."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")

    def peak_rss_mb(self) -> float:
        """Return the most memory it had resident."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


def broadcast(contestant: str, source: Path, warm: Path, tree: tuple[int, int]) -> Run:
    """Return how one broadcast of the source through a fresh tree went."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(dir=source.parent))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        nodes = _start(contestant, folder, tree, stack)
        nodes[0].tell(str(warm))
        for node in nodes:
            node.hear_version(1)
        before = [node.cpu_s() for node in nodes]
        started_s = time.time()
        nodes[0].tell(str(source))
        ended_s = [node.hear_version(2) for node in nodes[1 + tree[0] :]]
        cpu = {node.name: node.cpu_s() - cpu for node, cpu in zip(nodes, before, strict=True)}
        rss = {node.name: node.peak_rss_mb() for node in nodes}
        return Run(max(ended_s) - started_s, cpu, rss)


def _start(
    contestant: str, folder: Path, tree: tuple[int, int], stack: contextlib.ExitStack
) -> list[Node]:
    program = (
        [sys.executable, "-m", "benchmarks.shardcast.shardcast_node"]
        if contestant == "muster"
        else [str(PEER), "-m", "benchmarks.shardcast.shardcast_peer"]
    )

    def start(role: str, name: str, upstreams: list[str]) -> Node:
        node = Node(name, [*program, role, str(folder / name), KEY, *upstreams])
        stack.callback(node.close)
        if contestant != "muster":
            assert node.url  # it cannot start twice at once on one machine
        return node

    origin = start("origin", "origin", [])
    relays = [start("relay", f"relay-{i}", [origin.url]) for i in range(tree[0])]
    urls = [relay.url for relay in relays]
    clients = [start("client", f"client-{i}", urls) for i in range(tree[1])]
    assert all(client.url for client in clients)
    return [origin, *relays, *clients]


def plain_hop(source: Path) -> tuple[float, float]:
    """Return wall and CPU seconds of curl writing the file from a sendfile server to the disk."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.shardcast.sendfile_server", str(source)],
        stdout=subprocess.PIPE,
    )
    target = source.with_name("hop")
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        before, started_s = os.times(), time.perf_counter()
        url = f"http://127.0.0.1:{port}/"
        subprocess.run(["curl", "--silent", "--output", str(target), url], check=True)
        wall_s, after = time.perf_counter() - started_s, os.times()
        return wall_s, sum(after[2:4]) - sum(before[2:4])
    finally:
        server.kill()
        server.communicate()
        target.unlink(missing_ok=True)


def copy(source: Path) -> float:
    """Return the wall seconds of cp."""
    target = source.with_name("copy")
    started_s = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", str(source), str(target)], check=True)
    wall_s = time.perf_counter() - started_s
    target.unlink()
    return wall_s


@contextlib.contextmanager
def sources(size_mib: int, folder: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a file of that size, already on the disk, and one of 1 MiB."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for file, blocks in (("source", size_mib), ("warm", 1)):
            with (Path(name) / file).open("wb") as target:
                for _ in range(blocks):
                    target.write(os.urandom(1 << 20))
                target.flush()
                os.fsync(target.fileno())
        yield Path(name) / "source", Path(name) / "warm"


def measure(size_mib: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return every contestant's runs for one size, and why the peer lacks some."""
    hops: list[tuple[float, float]] = []
    copies: list[float] = []
    runs: dict[str, list[Run]] = {}
    absent: dict[str, str] = {}
    loads: list[float] = []
    repeat = options.repeat if size_mib <= MIB_OF_MANY else min(3, options.repeat)
    with sources(size_mib, options.folder) as (source, warm):
        for repetition in range(repeat):
            say(f"{size_mib} MiB, {repetition + 1} of {repeat}")
            loads.append(os.getloadavg()[0])
            copies.append(copy(source))
            for name, tree in TREES.items():
                hops.append(plain_hop(source))
                run = broadcast("muster", source, warm, tree)
                runs.setdefault(f"muster, {name}", []).append(run)
                say(f"  hop {hops[-1][0]:.2f} s; {name} {run.wall_s:.2f} s")
            is_peers = len(runs.get(PEER_NAME, ())) < options.peer_repeat
            if is_peers and repetition < options.peer_repeat + PEER_FAILURES:
                _measure_peer(size_mib, options.peer_most, source, warm, runs, absent)
    return {
        "cp_s": copies,
        "hop_s": [wall for wall, _ in hops],
        "hop_cpu_s": [cpu for _, cpu in hops],
        "load": loads,
        "runs": {name: [run._asdict() for run in found] for name, found in runs.items()},
        "absent": absent,
    }


def _measure_peer(
    size_mib: int,
    most_mib: int,
    source: Path,
    warm: Path,
    runs: dict[str, list[Run]],
    absent: dict[str, str],
) -> None:
    """Add the peer's run, or why there is none."""
    if not PEER.exists():
        absent[PEER_NAME] = "not installed: make bench-shardcast installs it"
    elif size_mib > most_mib:
        absent[PEER_NAME] = f"given no more than {most_mib} MiB (--peer-most)"
    else:
        try:
            run = broadcast("peer", source, warm, (2, 2))
        except Silent as silent:
            absent[PEER_NAME] = str(silent)
            say(f"  {PEER_NAME}: {silent}")
        else:
            runs.setdefault(PEER_NAME, []).append(run)
            say(f"  {PEER_NAME} {run.wall_s:.2f} s")


def say(line: str) -> None:
    """Show the progress of the benchmark."""
    print(line, file=sys.stderr, flush=True)


def show(size_mib: int, found: dict[str, Any]) -> None:
    """Print one size's table."""
    hop_s = statistics.median(found["hop_s"])
    print(f"\n{size_mib} MiB, load average {statistics.median(found['load']):.1f}")
    print(f"  {'':<42} {'median s':>9} {'/ hop':>7} {'CPU s':>7} {'most MB':>8} {'runs':>5}")
    print(f"  {'cp':<42} {statistics.median(found['cp_s']):>9.2f}")
    cpu_s = statistics.median(found["hop_cpu_s"])
    print(f"  {'plain hop (curl)':<42} {hop_s:>9.2f} {1:>7.2f} {cpu_s:>7.2f}"
          f" {'':>8} {len(found['hop_s']):>5}")  # fmt: skip
    for name, reason in found["absent"].items():
        print(f"  {name:<42} {reason}")
    for name, runs in found["runs"].items():
        wall_s = statistics.median(run["wall_s"] for run in runs)
        cpu_s = statistics.median(sum(run["cpu_s"].values()) for run in runs)
        rss_mb = max(max(run["rss_mb"].values()) for run in runs)
        print(f"  {name:<42} {wall_s:>9.2f} {wall_s / hop_s:>7.2f} {cpu_s:>7.2f}"
              f" {rss_mb:>8.0f} {len(runs):>5}")  # fmt: skip
        last = runs[-1]["cpu_s"]
        print("    CPU s:", ", ".join(f"{node} {used:.2f}" for node, used in last.items()))


def hop_ratio(found: dict[str, Any]) -> float:
    """Return the median broadcast through 2 relays over the median hop."""
    runs = found["runs"][f"muster, {next(iter(TREES))}"]
    ratio: float = statistics.median(r["wall_s"] for r in runs) / statistics.median(found["hop_s"])
    return ratio


def main() -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[64, 512, 2048], help="sizes in MiB"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peer-repeat", type=int, default=1)
    parser.add_argument("--peer-most", type=int, default=512, help="largest size for the peer, MiB")
    parser.add_argument("--folder", type=Path, help="folder of the files [a temporary one]")
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    detail = {}
    for size_mib in options.sizes:
        detail[f"{size_mib} MiB"] = found = measure(size_mib, options)
        show(size_mib, found)
    metrics = {f"hop_ratio_{size}": hop_ratio(detail[f"{size} MiB"]) for size in options.sizes}
    metrics["rss_mb_max"] = max(
        most
        for found in detail.values()
        for name, runs in found["runs"].items()
        if name.startswith("muster")
        for run in runs
        for most in run["rss_mb"].values()
    )
    if options.dry:
        print(metrics)
    else:
        write("shardcast", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    main()
