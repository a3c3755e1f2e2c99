"""One process of shardcast 0.3.2 in the broadcast benchmark; same lines as shardcast_node.py.

    python -m benchmarks.shardcast.shardcast_peer origin|relay|client FOLDER _ UPSTREAM...

Its middle nodes poll every second here, every 30 by default. It wants a file data1.bin on every
server, and nodes started together on one machine collide in /tmp: the caller starts them in turn.
"""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path


def say(**fields: object) -> None:
    """Write one line to the real stdout: the package prints, too."""
    os.write(OUT, (json.dumps(fields) + "\n").encode())


def free_port() -> int:
    """Return a port nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def origin(folder: Path) -> None:
    """Broadcast what stdin names."""
    import shardcast

    port = free_port()
    (folder / "data1.bin").write_bytes(os.urandom(1 << 20))
    shardcast.initialize(str(folder), port)
    say(url=f"http://127.0.0.1:{port}")
    for version, line in enumerate(sys.stdin, start=1):
        shardcast.broadcast(line.strip())
        say(version=version, time_s=time.time())


def relay(folder: Path, upstreams: list[str]) -> None:
    """Mirror; a version counts as held when all its shards are there."""
    from shardcast.middle_node import MiddleNode

    port = free_port()
    (folder / "data1.bin").write_bytes(os.urandom(1 << 20))
    node = MiddleNode(upstreams, str(folder), port, check_interval=1)
    say(url=f"http://127.0.0.1:{port}")
    done = 0
    while True:
        time.sleep(0.05)
        held = [int(name[1:]) for name in node.processed_versions if name[1:].isdecimal()]
        if max(held, default=0) > done:
            done = max(held)
            say(version=done, time_s=time.time())


def client(folder: Path, relays: list[str]) -> None:
    """Fetch every version as soon as a relay lists it; again while it fails."""
    from shardcast.client_node import ClientNode

    node = ClientNode(relays, str(folder))
    say(url=None)
    done = 0
    while True:
        listed = [int(name[1:]) for name in node.list_available_versions()]
        newest = max(listed, default=0)
        target = str(folder / f"model-{newest}")
        if newest > done and node.download_version(f"v{newest}", target):
            done = newest
            say(version=done, time_s=time.time())
        time.sleep(0.05)


def main() -> None:
    """Run the role named on the command line."""
    role, name, _, *peers = sys.argv[1:]
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    if role == "origin":
        origin(folder)
    elif role == "relay":
        relay(folder, peers)
    else:
        client(folder, peers)
    threading.Event().wait()


OUT = os.dup(1)
os.dup2(2, 1)

if __name__ == "__main__":
    main()
