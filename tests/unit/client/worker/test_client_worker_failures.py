"""A worker when the world fails: full disks, sleeping machines, kills, policies that move on."""

import asyncio
import errno
import json
import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_desk import Desk, run_until
from worlds.client_world import (
    NOW,
    ROOT,
    RUN,
    VERSION,
    HashEngine,
    make_rollouts,
    make_submission,
    make_ticket,
)

from muster.client import durable_log
from muster.client.durable_log import Journal
from muster.client.worker.loop import WorkerLoop
from muster.inference.engine import Completion, Request
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainUnreachable, EngineError, StorageError
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Submission, Ticket
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.tasks import Undecided, registry


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# An engine that fails, and answers that cannot be graded


class Failing(HashEngine):  # type: ignore[misc]
    """Fails once when it generates for a ticket, and may lose its policy."""

    trouble: Exception | None = None
    loses_policy = False

    def generate(self, requests: Sequence[Request], **options: Any) -> list[Completion]:
        if self.policy_version is None:
            raise EngineError("no policy is loaded")
        if options.get("due") and self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            if self.loses_policy:
                self.policy_version = None
            raise trouble
        return super().generate(requests, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("loses_policy", [False, True])
@pytest.mark.parametrize("trouble", [EngineError("inference failed"), MemoryError("no room")])
async def test_worker_goes_on_after_its_engine_failed(
    tmp_path: Path, trouble: Exception, loses_policy: bool
) -> None:
    engine = Failing()
    engine.trouble, engine.loses_policy = trouble, loses_policy
    desk = Desk(tmp_path, engine=engine)
    desk.orchestrator.tickets.append(make_ticket())
    await run_until(desk.loop, lambda: bool(desk.orchestrator.uploads))
    assert len(engine.loaded) == 1 + loses_policy
    desk.close()


async def test_ticket_with_an_answer_that_cannot_be_graded_is_generated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifiers = {
        kind: replace(each, grade=lambda _problem, _text: Undecided("the scorer raised"))
        for kind, each in registry.installed_verifiers().items()
    }
    monkeypatch.setattr(registry, "installed_verifiers", lambda: verifiers)
    desk = Desk(tmp_path, engine=Failing())
    desk.orchestrator.tickets.extend(make_ticket(index=index) for index in (0, 1))
    for _ in range(2):
        await desk.loop.work_once()
    desk.engine.trouble = AssertionError("a ticket was generated again")
    await desk.loop.work_once()
    assert desk.orchestrator.calls["lease"] == 3
    assert not desk.orchestrator.uploads
    desk.close()


# A slot that is given out twice


async def test_slot_that_is_worked_on_is_not_worked_on_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    desk.loop.context.held.tickets.append(make_ticket())
    desk.orchestrator.tickets.append(make_ticket(deadline=make_ticket().deadline + 1))
    await desk.loop.work_once()
    assert not desk.orchestrator.uploads
    [refusal] = [r for r in caplog.records if "that can be worked on" in r.getMessage()]
    assert "its slot is already worked on" in vars(refusal)["error"]
    desk.close()


async def test_work_for_a_slot_that_was_signed_meanwhile_is_replaced_by_the_signed_work(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    ticket = make_ticket()
    rows = make_rollouts(ticket)
    others = [replace(row, task_reward=1.0 - row.task_reward) for row in rows]
    submission, data = make_submission(ticket, others), encode_rollouts(others)
    desk.journal.record(ticket, bytes(65), submission, data)
    await desk.loop.submit(ticket, rows)
    assert [(s, d) for s, _, d in desk.orchestrator.uploads] == [(submission, data)]
    desk.close()


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, if this user can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems may not be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Entries(Journal):
    """Remembers numbers."""

    def __init__(self, path: Path) -> None:
        self.entries: list[dict[str, Any]] = []
        super().__init__(path)

    def take_in(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)


def test_a_journal_on_a_full_disk_keeps_nothing_of_what_it_refused(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with Entries(small_disk / "j") as journal:
        journal.append({"n": 1})
        filler.write_bytes(bytes(56 * 1024))
        with pytest.raises(StorageError, match="No space left") as caught:
            journal.append({"n": "x" * 20_000})
        assert "the disk is full" in (caught.value.hint or "")
        filler.unlink()
        journal.append({"n": 3})
    with Entries(small_disk / "j") as journal:
        assert journal.entries == [{"n": 1}, {"n": 3}]


async def test_a_worker_on_a_full_disk_signs_nothing_and_goes_on_once_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(small_disk)
    filler = small_disk / "filler"
    room = os.statvfs(small_disk)
    filler.write_bytes(bytes(room.f_bavail * room.f_frsize))
    desk.orchestrator.tickets.append(make_ticket())

    def has_waited() -> bool:
        if desk.orchestrator.calls["lease"] >= 4 and filler.exists():
            assert not desk.orchestrator.uploads
            assert desk.journal.signed(make_ticket()) is None
            filler.unlink()
        return bool(desk.orchestrator.uploads)

    with caplog.at_level(logging.INFO):
        await run_until(desk.loop, has_waited)
    said = "the disk is not available, trying again until it is"
    assert messages(caplog).count(said) == 1
    assert "the disk is available again" in messages(caplog)
    desk.close()


async def test_a_disk_that_refuses_to_sync_signs_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    desk.orchestrator.tickets.append(make_ticket())
    monkeypatch.setattr(durable_log.os, "fsync", full)
    with pytest.raises(StorageError):
        await desk.loop.work_once()
    assert not desk.orchestrator.uploads
    assert desk.journal.signed(make_ticket()) is None
    assert not list(desk.journal._files.iterdir())


# A laptop that sleeps


class Sleeper(WorkerLoop):
    """Loses an hour while it generates."""

    desk: Desk

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        rollouts = await super().generate(ticket)
        self.desk.now_s += 3600
        return rollouts


async def test_a_ticket_that_lapsed_while_the_machine_slept_is_given_up_unsigned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path, Sleeper)
    desk.loop.desk = desk  # type: ignore[attr-defined]
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    assert not desk.orchestrator.uploads
    assert desk.journal.signed(make_ticket()) is None
    assert "ticket left to lapse, its time is over" in messages(caplog)
    desk.close()


async def test_work_in_time_is_sent_though_the_chain_is_away_by_then(desk: Desk) -> None:
    answers = iter([NOW])

    async def once() -> int:
        try:
            return next(answers)
        except StopIteration:
            raise ChainUnreachable("no answer") from None

    desk.loop.context = replace(desk.loop.context, now=once)
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    assert len(desk.orchestrator.uploads) == 1


# Policies that move on


async def test_a_policy_that_comes_while_generating_is_for_the_next_ticket(tmp_path: Path) -> None:
    class Overtaken(WorkerLoop):
        async def generate(self, ticket: Ticket) -> list[Rollout]:
            run = self.context.view.runs[RUN]
            run.latest_version = PolicyVersion(4)
            run.checkpoints[run.latest_version] = SimpleNamespace(
                manifest_root=ROOT, beacon=keccak(b"block 50"), block_number=50
            )
            return await super().generate(ticket)

    desk = Desk(tmp_path, Overtaken)
    newer = make_ticket(index=1, policy_version=PolicyVersion(4), beacon=keccak(b"block 50"))
    desk.orchestrator.tickets.extend([make_ticket(), newer])
    await run_until(desk.loop, lambda: len(desk.orchestrator.uploads) == 2)
    assert [each[0].policy_version for each in desk.orchestrator.uploads] == [VERSION, 4]
    assert [version for _, version in desk.engine.loaded] == [VERSION, 4]
    desk.close()


# Stops and kills


async def test_a_stop_in_mid_generation_leaves_nothing_signed(tmp_path: Path) -> None:
    class Slow(WorkerLoop):
        async def generate(self, _ticket: Ticket) -> list[Rollout]:
            self.state = "generating"
            await asyncio.Event().wait()
            raise AssertionError

    desk = Desk(tmp_path, Slow)
    desk.orchestrator.tickets.append(make_ticket())
    await run_until(desk.loop, lambda: desk.loop.state == "generating")
    assert not desk.orchestrator.uploads
    assert desk.journal.signed(make_ticket()) is None
    desk.close()


class Moody(WorkerLoop):
    """Signs something else every time: signing a slot again would show."""

    def claim(self, ticket: Ticket, rollouts: list[Rollout], data_hash: Any) -> Submission:
        honest = super().claim(ticket, rollouts, data_hash)
        return replace(honest, units=random.SystemRandom().randrange(1 << 40))


def live(state: Path, uploads: Path) -> None:
    """Run a worker until it is killed; each signature that it sends adds a line to `uploads`."""
    desk = Desk(state, Moody)
    desk.orchestrator.tickets.extend(make_ticket(index=index) for index in range(40))
    submit = desk.orchestrator.submit

    async def noting(submission: Submission, signature: bytes, body: bytes) -> Any:
        line = json.dumps([submission.index, signature.hex()]).encode() + b"\n"
        with uploads.open("ab", buffering=0) as file:
            file.write(line)
        return await submit(submission, signature, body)

    desk.orchestrator.submit = noting  # type: ignore[method-assign]
    asyncio.run(run_until(desk.loop, lambda: not desk.orchestrator.tickets))


def kill_in_mid_life(state: Path, uploads: Path, rng: random.Random) -> None:
    """Kill a worker a moment after it has sent some signatures."""
    enough = uploads.read_text().count("\n") + rng.randrange(1, 12)
    pid = os.fork()
    if pid == 0:
        try:
            live(state, uploads)
        finally:
            os._exit(0)
    # Real time: the kernel, not a clock of ours, decides where the kill falls.
    give_up_at = time.monotonic() + 10
    while uploads.read_text().count("\n") < enough and time.monotonic() < give_up_at:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.03))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("seed", range(3))
def test_no_slot_is_signed_twice_by_a_worker_that_is_killed_at_random(
    tmp_path: Path, seed: int
) -> None:
    uploads = tmp_path / "uploads"
    uploads.touch()
    rng = random.Random(seed)
    for _ in range(6):
        kill_in_mid_life(tmp_path / "state", uploads, rng)
    signatures: dict[int, set[str]] = {}
    for line in uploads.read_text().splitlines():
        index, signature = json.loads(line)
        signatures.setdefault(index, set()).add(signature)
    assert len(signatures) > 2
    assert all(len(found) == 1 for found in signatures.values())


class Stuck(HashEngine):
    """Passes the policy's check, generates `tickets` tickets, and never finishes the next."""

    def __init__(self, tickets: int) -> None:
        super().__init__()
        self.left = 1 + tickets

    def generate(self, requests: Any, **options: Any) -> Any:
        self.left -= 1
        while self.left < 0:
            time.sleep(1)
        return super().generate(requests, **options)


def hold_two(state: Path, uploads: Path, signed: int) -> None:
    """Run a worker with two tickets, `signed` of which are signed and being uploaded."""
    desk = Desk(state, Moody, engine=Stuck(signed))
    desk.loop.take_helpers([Moody(desk.loop.context)])
    desk.loop.station.took(1.0)
    desk.loop.context.held.lease_s = 600.0
    desk.orchestrator.tickets.extend(make_ticket(index=index) for index in range(2))

    async def never_arrives(submission: Submission, signature: bytes, _body: bytes) -> Any:
        with uploads.open("a") as file:
            print(submission.index, signature.hex(), file=file)
        await asyncio.Event().wait()

    desk.orchestrator.submit = never_arrives  # type: ignore[method-assign]

    def is_so() -> bool:
        sent = uploads.read_text().count("\n")
        if len(desk.loop.context.held.tickets) == 2 and sent == signed:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    asyncio.run(run_until(desk.loop, is_so))


async def live_again(state: Path) -> list[Any]:
    """Return the uploads of a worker to which the orchestrator gives both tickets again."""
    desk = Desk(state, Moody)
    desk.loop.take_helpers([Moody(desk.loop.context)])
    desk.orchestrator.tickets.extend(make_ticket(index=index) for index in range(2))
    await run_until(desk.loop, lambda: len(desk.orchestrator.uploads) >= 2)
    desk.close()
    return desk.orchestrator.uploads


@pytest.mark.parametrize("signed", [0, 1, 2])
def test_two_tickets_of_a_killed_worker_are_delivered_after_its_restart(
    tmp_path: Path, signed: int
) -> None:
    uploads = tmp_path / "uploads"
    uploads.touch()
    pid = os.fork()
    if pid == 0:
        try:
            hold_two(tmp_path / "state", uploads, signed)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    left = [line.split() for line in uploads.read_text().splitlines()]
    assert len(left) == signed
    sent = asyncio.run(live_again(tmp_path / "state"))
    arrived = {submission.index: signature.hex() for submission, signature, _ in sent}
    assert len(sent) == len(arrived) == 2
    # The second life delivers the same files as the first: no slot is signed twice.
    assert {index: arrived[int(index)] for index, _ in left} == dict(left)
