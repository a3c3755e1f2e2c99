"""Broadcast over emulated links: 100 Mbit/s, 50 ms round trip, 1 % loss, real TCP; needs root.

    python -m benchmarks.shardcast.shardcast_links [--mib 16] [--relays 2] [--clients 4]

Under random loss the congestion control decides: cubic takes every lost packet for a full queue.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shardcast.emulated_links import Link, Network
from benchmarks.shardcast.shardcast import KEY, Node

CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def broadcast(mib: int, relays: int, clients: int, link: Link) -> dict[str, float | str]:
    """Return how long it took until every client held the file, and what the links allow."""
    network = Network(1 + relays + clients, link)
    with contextlib.ExitStack() as stack:
        stack.enter_context(network.up())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes: list[Node] = []

        def start(role: str, upstreams: list[str]) -> str:
            number = len(nodes)
            program = [sys.executable, "-m", "benchmarks.shardcast.shardcast_node", role]
            command = [*program, str(folder / str(number)), KEY, *upstreams]
            os.environ["MUSTER_BENCH_HOST"] = network.address(number)
            nodes.append(Node(role, network.command(number, command)))
            stack.callback(nodes[-1].close)
            return nodes[-1].url

        origin = start("origin", [])
        above = [start("relay", [origin]) for _ in range(relays)]
        for _ in range(clients):
            start("client", above)
        source = folder / "source"
        source.write_bytes(os.urandom(mib << 20))
        started_s = time.time()
        nodes[0].tell(str(source))
        ended_s = max(node.hear_version(1) for node in nodes)
        copies = max(relays, clients / relays, 1)
        bound_s = copies * (mib << 20) / link.bytes_per_s
        return {
            "mib": mib,
            "relays": relays,
            "clients": clients,
            "wall_s": ended_s - started_s,
            "bound_s": bound_s,
            "over_bound": (ended_s - started_s) / bound_s,
            "congestion": link.congestion or CONGESTION.read_text().strip(),
            "packets_lost": network.dropped / max(1, network.dropped + network.passed),
        }


def main() -> None:
    """Measure once, print one line of JSON; exit code 77 when the machine cannot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--relays", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--congestion", default="", help="such as cubic; the machine's by default")
    options = parser.parse_args()
    if reason := Network.missing():
        print(f"skipped: {reason}", file=sys.stderr)
        raise SystemExit(77)
    link = Link(loss=options.loss, congestion=options.congestion)
    print(json.dumps(broadcast(options.mib, options.relays, options.clients, link)))


if __name__ == "__main__":
    main()
