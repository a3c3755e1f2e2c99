"""Programs against the sandbox: they delay a grader, or use resources that no process limit counts.

`play_programs` runs them all, an honest one after each, as a grader would.
"""

import time
from contextlib import suppress

from muster.tasks.sandbox import Limits, Sandbox, SandboxJob, SandboxUnavailable

LIMITS = Limits(cpu_s=1, wall_s=3.0, total_s=10.0)
"""Limits of each program."""

STOPS = {
    "stops itself": "os.kill(os.getpid(), 19)",
    "stops all": "os.kill(-1, 19); os.kill(os.getpid(), 19)",
    "stops its session": "os.killpg(0, 19)",
    "stops after leaving its session": "os.fork() or os.setsid(); os.kill(os.getpid(), 19)",
    "closes its output and lives on": "os.close(1); time.sleep(60)",
    "leaves a child that holds its output": "os.fork() or time.sleep(60); os.close(1)",
    "waits for its own pipe": "os.read(os.pipe()[0], 1)",
    "writes to a pipe that nobody reads": "os.write(os.pipe()[1], bytes(1 << 20))",
    "waits for itself": "import threading as t; x = t.Lock(); x.acquire(); x.acquire()",
    "ignores what ends it": "[signal.signal(n, 1) for n in (1, 2, 15)]; time.sleep(60)",
    "leaves zombies": "[os.fork() or os._exit(0) for _ in range(9)]; time.sleep(60)",
}
"""Statements that make a program wait, or others wait; they use `os`, `signal` and `time`."""

TAKES = {
    "files": "for i in range(10**7): open(str(i), 'w').close()",
    "folders": "for i in range(10**7): os.mkdir(str(i))",
    "deep folders": "while True: os.mkdir('d'); os.chdir('d')",
    "links": "for i in range(10**7): os.symlink('x' * 4000, str(i))",
    "hard links": "open('x', 'w')\nfor i in range(10**7): os.link('x', str(i))",
    "fifos": "for i in range(10**7): os.mkfifo(str(i))",
    "attributes": "open('x', 'w')\n"
    "for i in range(10**7): os.setxattr('x', f'user.{i}', bytes(60000))",
    "sparse files": "for i in range(10**7): os.truncate(os.open(str(i), 65), 1 << 20)",
    "deleted files": "for i in range(10**7): os.write(os.open('x', 65), bytes(1 << 20)); "
    "os.unlink('x')",
    "pipes": "x = [fcntl.fcntl(os.pipe()[1], 1031, 1 << 20) for i in range(10**7)]",
    "full pipes": "for i in range(10**7): p = os.pipe()[1]; os.set_blocking(p, 0); "
    "os.write(p, bytes(65536))",
    "socket pairs": "import socket\nx = []\nwhile True:\n"
    " x += socket.socketpair(); x[-1].setblocking(0); x[-1].send(bytes(200000))",
    "shared memory": "assert C.shmget(0, 1 << 26, 0o1600) >= 0",
    "message queues": "assert C.msgget(0, 0o1600) >= 0",
    "semaphores": "assert C.semget(0, 1000, 0o1600) >= 0",
    "posix queues": "assert C.mq_open(b'/x', 66, 0o600, 0) >= 0",
    "memory files": "os.memfd_create('x')",
    "secret memory": "assert C.syscall(447, 0) >= 0",
    "keys": "assert C.syscall(248, b'user', b'x', bytes(9), 9, -3) >= 0",
    "watches": "assert C.inotify_init1(0) >= 0",
    "locked memory": "assert C.mlockall(3) == 0",
    "timers": "x = ctypes.c_long()\n"
    "for i in range(10**7): assert C.timer_create(1, 0, ctypes.byref(x)) == 0",
    "queued signals": "for i in range(10**7): assert C.sigqueue(os.getpid(), 34, 0) == 0",
    "mappings": "import mmap\nx = [mmap.mmap(-1, 4096) for _ in range(10**7)]",
    "shared mappings": "import mmap\nx = mmap.mmap(-1, 480 << 20); x.write(bytes(480 << 20))",
    "threads": "import threading\n"
    "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "limits of the runner": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
    "priority": "os.nice(19)",
    "one processor": "os.sched_setaffinity(0, {0})",
}
"""Statements that use the kernel's memory, see `tried`."""


def tried(statements: str) -> str:
    """Return the program that tries statements of TAKES, and prints "blocked" when stopped."""
    head = "import ctypes, fcntl, os, resource, time\nC = ctypes.CDLL(None)\ntry:\n"
    body = "\n".join(f" {line}" for line in statements.splitlines())
    return head + body + "\nexcept BaseException:\n os.write(1, b'blocked')\n"


def play_programs(sandbox: Sandbox) -> dict[str, float]:
    """Return the time of the longest attack, the number of attacks, and the number of attacks after
    which an honest program was served.
    """
    programs = [f"import os, signal, time\n{attack}" for attack in STOPS.values()]
    programs += [tried(attack) for attack in TAKES.values()]
    longest_s, served = 0.0, 0
    for program in programs:
        started = time.monotonic()
        with suppress(SandboxUnavailable):  # the machine is busy
            sandbox.run(SandboxJob(program, ("",)), LIMITS)
        honest = sandbox.run(SandboxJob("print(input())", ("1",)), LIMITS).tests[0]
        longest_s = max(longest_s, time.monotonic() - started)
        served += honest is not None and honest.out == b"1\n"
    return {"attacks": len(programs), "honest_served": served, "longest_s": longest_s}
