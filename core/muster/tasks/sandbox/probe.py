"""The self-test's attacks: runs inside the sandbox and reports which ones succeed."""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable


def main() -> None:
    """Try all attacks and write the findings."""
    found = {name: _succeeds(attack) for name, attack in ATTACKS.items()}
    sys.stdout.write(json.dumps(found) + "\n")


def _succeeds(attack: Callable[[], object]) -> bool:
    try:
        return bool(attack())
    except BaseException:  # any error means that the attack was stopped
        return False


def _connects() -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", 22)) >= 0


def _forks_freely() -> bool:
    for _ in range(64):
        if not os.fork():
            os._exit(0)
    return True


def _writes(path: str) -> bool:
    with open(path, "w") as file:
        return file.write("x") == 1


def _writes_much() -> bool:
    with open("/tmp/much", "wb") as file:
        return file.write(bytes(64 << 20)) == 64 << 20


def _makes_many_files() -> bool:
    for number in range(4096):
        os.mkdir(f"/tmp/folder-{number}")
    return True


def _stops_its_runner() -> bool:
    os.kill(os.getppid(), signal.SIGSTOP)
    return os.getppid() != 1


def _reads(path: str) -> bool:
    with open(path) as file:
        return bool(file.read(1))


def _unshares() -> bool:
    clone_newuser = 0x10000000
    return int(ctypes.CDLL(None).unshare(clone_newuser)) == 0


ATTACKS: dict[str, Callable[[], object]] = {
    "open a socket": _connects,
    "read /etc/shadow": lambda: _reads("/etc/shadow"),
    "read /etc/passwd": lambda: _reads("/etc/passwd"),
    "write to /usr": lambda: _writes("/usr/muster"),
    "write to /": lambda: _writes("/muster"),
    "see processes": lambda: os.listdir("/proc"),
    "see /root": lambda: os.listdir("/root"),
    "see /home": lambda: os.listdir("/home"),
    "allocate 2 GiB": lambda: bytearray(2 << 30),
    "write 64 MiB": _writes_much,
    "make 4096 folders": _makes_many_files,
    "stop its runner": _stops_its_runner,
    "make a user namespace": _unshares,
    "fork 64 times": _forks_freely,
}

if __name__ == "__main__":
    main()
