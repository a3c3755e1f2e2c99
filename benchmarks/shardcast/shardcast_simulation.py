"""A broadcast to many clients, simulated chunk by chunk; relays are chosen by the real RelayScores.

    python -m benchmarks.shardcast.shardcast_simulation

Every node has an uplink and a downlink that pass one chunk after the other, and a latency to every
other node. A relay passes a chunk on once it holds all of it; a client asks `parallel` chunks at a
time, each from a relay chosen by success rate x bandwidth. No CPU, disk or loss: what is left is
the cost of the tree itself against the bound that its links set.
"""

import heapq
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from muster.shardcast.transfer import RelayScores


class Shape(NamedTuple):
    """What is broadcast, through what."""

    clients: int
    """Nodes below the last layer of relays."""
    layers: tuple[int, ...]
    """Relays in each layer, the one below the origin first."""
    chunks: int = 128
    """Chunks of the version."""
    chunk_bytes: int = 8 << 20
    """Bytes of each."""
    up_bytes_per_s: float = 125e6
    """Uplink of origin and relays: 1 Gbit/s."""
    down_bytes_per_s: float = 125e6
    """Downlink of everyone."""
    latency_s: float = 0.05
    """One way, between any two nodes."""
    parallel: int = 4
    """Chunks that a node asks for at the same time."""
    relays_known: int = 4
    """Relays that a client knows, at random."""


@dataclass
class _Node:
    held: set[int] = field(default_factory=set)
    asked: int = 0
    up_free_s: float = 0.0
    down_free_s: float = 0.0
    waiting: dict[int, list[Callable[[float], None]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Simulation:
    """One broadcast; `run` returns when each client had everything."""

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        self.shape = shape
        self._rng = Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._nodes: dict[str, _Node] = {}
        self._upstreams: dict[str, RelayScores] = {}
        self._done_s: dict[str, float] = {}
        self._build()

    def run(self) -> dict[str, float]:
        """Return the seconds from publication to completion of every client, by name."""
        for name in self._upstreams:
            for _ in range(self.shape.parallel):
                self._at(self.shape.latency_s, lambda now, name=name: self._ask(name, now))  # type: ignore[misc]
        while self._events:
            now_s, _, action = heapq.heappop(self._events)
            action(now_s)
        return {name: at for name, at in self._done_s.items() if name.startswith("http://client")}

    def _build(self) -> None:
        origin = "http://origin"
        self._nodes[origin] = _Node(held=set(range(self.shape.chunks)))
        above = [origin]
        for depth, count in enumerate(self.shape.layers):
            layer = [f"http://relay-{depth}-{i}" for i in range(count)]
            for i, name in enumerate(layer):
                self._add(name, [above[i % len(above)]])
            above = layer
        for i in range(self.shape.clients):
            known = self._rng.sample(above, min(self.shape.relays_known, len(above)))
            self._add(f"http://client-{i}", known)

    def _add(self, name: str, upstreams: list[str]) -> None:
        self._nodes[name] = _Node()
        self._upstreams[name] = RelayScores(upstreams, rng=self._rng)

    def _at(self, time_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def _ask(self, name: str, now_s: float) -> None:
        node = self._nodes[name]
        if node.asked == self.shape.chunks:
            return
        chunk, node.asked = node.asked, node.asked + 1
        book = self._upstreams[name]
        source = book.choose(book.urls)

        def serve(ready_s: float) -> None:
            self._send(source, name, chunk, ready_s, asked_s=now_s)

        def arrive(at_s: float) -> None:
            if chunk in self._nodes[source].held:
                serve(at_s)
            else:
                self._nodes[source].waiting[chunk].append(serve)

        self._at(now_s + self.shape.latency_s, arrive)

    def _send(self, source: str, name: str, chunk: int, ready_s: float, *, asked_s: float) -> None:
        shape, sender, receiver = self.shape, self._nodes[source], self._nodes[name]
        sender.up_free_s = max(sender.up_free_s, ready_s) + shape.chunk_bytes / shape.up_bytes_per_s
        down_s = shape.chunk_bytes / shape.down_bytes_per_s
        first_s = sender.up_free_s - shape.chunk_bytes / shape.up_bytes_per_s + shape.latency_s
        receiver.down_free_s = max(
            max(receiver.down_free_s, first_s) + down_s, sender.up_free_s + shape.latency_s
        )

        def finish(at_s: float) -> None:
            receiver.held.add(chunk)
            self._upstreams[name].succeeded(source, shape.chunk_bytes, at_s - asked_s)
            for serve in receiver.waiting.pop(chunk, ()):
                serve(at_s)
            if len(receiver.held) == shape.chunks:
                self._done_s[name] = at_s
            self._ask(name, at_s)

        self._at(receiver.down_free_s, finish)


def bound_s(shape: Shape) -> float:
    """Return the time that the busiest link alone needs: no broadcast through it is faster."""
    size = shape.chunks * shape.chunk_bytes
    fan_outs, above = [], 1
    for count in (*shape.layers, shape.clients):
        fan_outs.append(count / above)
        above = count
    return max(size / shape.down_bytes_per_s, max(fan_outs) * size / shape.up_bytes_per_s)


SHAPES = (
    Shape(10, (2,)),
    Shape(100, (20,)),
    Shape(300, (60,)),
    Shape(1000, (200,)),
    Shape(1000, (10, 100)),
    Shape(1000, (4, 20, 100)),
    Shape(1000, (2, 8, 32, 128)),
)


def main() -> None:
    """Print completion against the bound for growing numbers of clients and layers."""
    print("1 GiB in chunks of 8 MiB, 1 Gbit/s up and down, 50 ms one way")
    print(
        f"{'clients':>8} {'layers':<18} {'bound s':>8} {'median s':>9} {'last s':>8} {'/ bound':>8}"
    )
    for shape in SHAPES:
        done = Simulation(shape).run().values()
        bound = bound_s(shape)
        print(
            f"{shape.clients:>8} {' > '.join(map(str, shape.layers)):<18} {bound:>8.1f} "
            f"{statistics.median(done):>9.1f} {max(done):>8.1f} {max(done) / bound:>8.2f}"
        )


if __name__ == "__main__":
    main()
