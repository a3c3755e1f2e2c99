"""Nodes in network namespaces of their own, joined by links of a given rate, delay and loss.

Real TCP of the kernel over TUN devices; the packets between them pass through one thread here,
which holds each back as long as the link would, and drops some. It needs root, but not netem, which
many kernels lack. Namespaces that a killed process left behind are deleted by the next.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 2048


class Link(NamedTuple):
    """What connects every node to the others."""

    bytes_per_s: float = 12.5e6
    """Rate up, and rate down: 100 Mbit/s."""
    delay_s: float = 0.025
    """One way, so that a round trip takes twice that."""
    loss: float = 0.01
    """Share of packets dropped, at random."""
    queue_s: float = 0.1
    """Packets that would wait longer than this for their link are dropped."""
    congestion: str = ""
    """Every node's TCP congestion control, by the kernel's name; empty for the machine's own."""


class Network:
    """A few namespaces; `address` and `command` say how to run a node in one of them."""

    def __init__(self, nodes: int, link: Link, *, seed: int = 0) -> None:
        self._link = link
        self._rng = Random(seed)
        self._names = [f"muster-{os.getpid()}-{i}" for i in range(nodes)]
        self._tuns: list[int] = []
        self._up_free_s = [0.0] * nodes
        self._down_free_s = [0.0] * nodes
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._stop = threading.Event()
        self.passed = self.dropped = 0

    @staticmethod
    def missing() -> str | None:
        """Return why this machine cannot emulate links, None when it can."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "the command ip is not installed"
        if not Path("/dev/net/tun").exists():
            return "there is no /dev/net/tun"
        probe = f"muster-probe-{os.getpid()}"
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
        subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
        return f"no network namespace: {made.stderr.strip()}" if made.returncode else None

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"10.77.0.{node + 1}"

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """Return what runs a command at a node."""
        return ["ip", "netns", "exec", self._names[node], *command]

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Keep the network while the context lasts."""
        thread = threading.Thread(target=self._forward, daemon=True)
        _delete_leftovers()
        try:
            for node, name in enumerate(self._names):
                _run("ip", "netns", "add", name)
                self._tuns.append(_tun_in(name))
                _run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", "tun0")
                _run("ip", "-n", name, "link", "set", "tun0", "up", "mtu", "1500")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                if self._link.congestion:
                    setting = f"net.ipv4.tcp_congestion_control={self._link.congestion}"
                    _run("ip", "netns", "exec", name, "sysctl", "-qw", setting)
            thread.start()
            yield
        finally:
            self._stop.set()
            if thread.is_alive():
                thread.join()
            for tun in self._tuns:
                os.close(tun)
            for name in self._names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def _forward(self) -> None:
        poller = select.epoll()
        nodes = {tun: node for node, tun in enumerate(self._tuns)}
        for tun in self._tuns:
            poller.register(tun, select.EPOLLIN)
        while not self._stop.is_set():
            due_s = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else 0.05
            for tun, _ in poller.poll(max(0.0, min(due_s, 0.05))):
                self._take_all(tun, nodes[tun])
            now_s = time.monotonic()
            while self._on_the_way and self._on_the_way[0][0] <= now_s:
                _, _, node, packet = heapq.heappop(self._on_the_way)
                with contextlib.suppress(OSError):
                    os.write(self._tuns[node], packet)
        poller.close()

    def _take_all(self, tun: int, source: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                self._take(source, os.read(tun, PACKET_BYTES))

    def _take(self, source: int, packet: bytes) -> None:
        target = packet[19] - 1
        is_ours = packet[0] >> 4 == 4 and packet[16:19] == b"\x0a\x4d\x00"
        if not is_ours or not 0 <= target < len(self._tuns):
            return
        now_s, took_s = time.monotonic(), len(packet) / self._link.bytes_per_s
        sent_s = max(now_s, self._up_free_s[source]) + took_s
        is_full = sent_s - now_s > self._link.queue_s
        if is_full or self._rng.random() < self._link.loss:
            self.dropped += 1
            return
        self._up_free_s[source] = sent_s
        there_s = max(sent_s + self._link.delay_s, self._down_free_s[target] + took_s)
        self._down_free_s[target] = there_s
        self.passed += 1
        heapq.heappush(self._on_the_way, (there_s, self.passed, target, packet))


def _delete_leftovers() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith("muster-")):
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _tun_in(name: str) -> int:
    """Return a TUN device of that namespace; this thread comes back out of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{name}") as away:
        if libc.setns(away.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
            return tun
        finally:
            libc.setns(home.fileno(), CLONE_NEWNET)
