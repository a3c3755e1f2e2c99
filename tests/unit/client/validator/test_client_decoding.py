"""The isolated decoder: hostile files never reach the validator's own process."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from worlds import client_world

from muster.client.validator import decoding
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.examiner import read_rows
from muster.client.validator.judging import Judgement, bounds_of
from muster.lab.redteam.hostile.bad_files import bad_files, give, odd_files
from muster.protocol.bounds import MAX_FILE_BYTES
from muster.protocol.errors import EncodingError, ValidatorDisturbed
from muster.protocol.messages import Reason, Verdict
from muster.protocol.rollouts import ANY, Bounds, Rollout, encode_rollouts
from muster.protocol.set_aside import NOTHING

ROW = Rollout("p", 0, 0, 2**64 - 1, -1, 3, (1, 2), (3, 4), b"\x00\xffproof", 0.25)
ROWS = [ROW, replace(ROW, sample=1, task_reward=1.0)]
ABORTS = Path(__file__).parent / "data" / "aborts-parquet.bin"


@pytest.fixture
async def decoder() -> AsyncIterator[FileDecoder]:
    async with FileDecoder() as opened:
        yield opened


async def test_honest_files_survive_unchanged(decoder: FileDecoder) -> None:
    assert await decoder.decode(encode_rollouts(ROWS)) == ROWS
    assert await decoder.decode(encode_rollouts(ROWS[:1])) == ROWS[:1]


async def test_malformed_files_are_refused_with_the_decoders_reason(decoder: FileDecoder) -> None:
    with pytest.raises(EncodingError, match="2 rows, allowed are 1 to 1"):
        await decoder.decode(encode_rollouts(ROWS), Bounds(rows=1))


async def test_a_file_that_aborts_the_library_is_refused_and_the_next_is_served(
    decoder: FileDecoder,
) -> None:
    with pytest.raises(EncodingError, match="not a readable Parquet file"):
        await decoder.decode(ABORTS.read_bytes())
    assert await decoder.decode(encode_rollouts(ROWS)) == ROWS


async def test_damaged_files_decode_or_are_refused(decoder: FileDecoder) -> None:
    for seed in range(40):
        random = Random(seed)
        damaged = bytearray(encode_rollouts(ROWS))
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        with contextlib.suppress(EncodingError):
            rows = await decoder.decode(bytes(damaged))
            assert all(0 <= row.task_reward <= 1 for row in rows), seed


async def test_a_file_that_takes_too_much_processor_time_twice_is_refused() -> None:
    many = encode_rollouts([replace(ROW, completion_tokens=(7,) * 100_000)] * 150)
    async with FileDecoder(cpu_s=0.0001) as decoder:
        with pytest.raises(EncodingError, match=r"broke the decoder twice \(SIGPROF\)"):
            await decoder.decode(many)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[signal.Signals]:
    """Signals that the next children get with their file; the last child gets none."""
    ask, signals = decoding._Child._ask, list[signal.Signals]()

    def asked(
        self: decoding._Child, data: bytes, bounds: Bounds, cpu_s: float
    ) -> tuple[int, bytes]:
        assert self._process is not None
        if signals and data != decoding._known_good():
            self._process.send_signal(signals.pop(0))
            self._process.wait()
        return ask(self, data, bounds, cpu_s)

    monkeypatch.setattr(decoding._Child, "_ask", asked)
    return signals


@pytest.mark.parametrize(
    "others", [[signal.SIGKILL, signal.SIGTERM], [signal.SIGSEGV], [signal.SIGKILL, signal.SIGABRT]]
)
async def test_a_file_whose_children_are_killed_or_crash_once_is_read(
    decoder: FileDecoder, deaths: list[signal.Signals], others: list[signal.Signals]
) -> None:
    deaths += others
    assert await decoder.decode(encode_rollouts(ROWS)) == ROWS


@pytest.mark.parametrize("own", [signal.SIGABRT, signal.SIGSEGV, signal.SIGPROF])
async def test_a_file_that_ends_two_children_by_itself_is_refused(
    decoder: FileDecoder, deaths: list[signal.Signals], own: signal.Signals
) -> None:
    deaths += [own, signal.SIGKILL, own]
    with pytest.raises(EncodingError, match=f"broke the decoder twice .{own.name}"):
        await decoder.decode(encode_rollouts(ROWS))


async def test_a_file_whose_children_are_all_killed_is_judged_by_nobody(
    decoder: FileDecoder, deaths: list[signal.Signals]
) -> None:
    deaths += [signal.SIGKILL] * decoding.TRIES
    with pytest.raises(ValidatorDisturbed, match="ended with -9"):
        await decoder.decode(encode_rollouts(ROWS))
    assert await decoder.decode(encode_rollouts(ROWS)) == ROWS


async def test_a_child_that_does_not_answer_in_time_is_held_against_no_file(
    decoder: FileDecoder,
) -> None:
    """Seconds in which the child could not run do not count."""
    await decoder.start()
    (child,) = decoder._idle
    assert child._process is not None
    child._process.send_signal(signal.SIGSTOP)
    decoder._wall_s = 0.1
    with pytest.raises(ValidatorDisturbed, match=r"did not answer within 0\.1 s"):
        await decoder._in_child(lambda child: child.decode(encode_rollouts(ROWS), ANY))
    decoder._wall_s = decoding.WALL_S
    assert await decoder.decode(encode_rollouts(ROWS)) == ROWS


async def test_a_child_that_does_not_start_is_held_against_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for program in ("/bin/false", "/nowhere/python"):
        monkeypatch.setattr(decoding.sys, "executable", program)
        async with FileDecoder() as decoder:
            with pytest.raises(ValidatorDisturbed, match="does not start"):
                await decoder.decode(encode_rollouts(ROWS))


@pytest.mark.parametrize("memory_mb", [60, 320, 400, 500, 600, 900])
async def test_a_file_is_read_or_judged_by_nobody_however_little_memory_there_is(
    memory_mb: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 20 MB decoded; over these limits memory ends at each stage: start, check, decoding,
    answer.
    """
    rows = [replace(ROW, sample=i, completion_tokens=(7,) * 50_000) for i in range(100)]
    short = tmp_path / "python"
    short.write_text(f'#!/bin/sh\nulimit -v {memory_mb * 1024}; exec {sys.executable} "$@"\n')
    short.chmod(0o700)
    monkeypatch.setattr(decoding.sys, "executable", str(short))
    async with FileDecoder() as decoder:
        with contextlib.suppress(ValidatorDisturbed):
            assert await decoder.decode(encode_rollouts(rows)) == rows


async def test_a_child_is_asked_and_its_answer_unpacked_outside_the_event_loop(
    decoder: FileDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(decoding, name)

        def noted(*arguments: Any) -> Any:
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return original(*arguments)

        return noted

    for name in ("_read", "_unpacked"):
        monkeypatch.setattr(decoding, name, noting(name))
    await decoder.decode(encode_rollouts(ROWS))
    assert set(threads) == {("_read", False), ("_unpacked", False)}


async def test_several_files_are_decoded_at_the_same_time(decoder: FileDecoder) -> None:
    data = encode_rollouts(ROWS)
    assert await asyncio.gather(*(decoder.decode(data) for _ in range(5))) == [ROWS] * 5
    assert len(decoder._idle) == decoding.CHILDREN


async def test_a_reader_that_gives_up_leaves_no_answer_behind(decoder: FileDecoder) -> None:
    await decoder.start()
    asking = asyncio.ensure_future(decoder.decode(encode_rollouts(ROWS)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await decoder.decode(encode_rollouts(ROWS[:1])) == ROWS[:1]


async def test_a_child_that_answers_while_it_is_given_up_is_waited_for(
    decoder: FileDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, children, answered = decoding._Child._ask, list[decoding._Child](), threading.Event()
    given_up = threading.Event()

    def slow(self: decoding._Child, *request: Any) -> tuple[int, bytes]:
        answer = ask(self, *request)
        if request[0] == decoding._known_good():
            return answer
        children.append(self)
        answered.set()
        assert given_up.wait(20)
        return answer

    monkeypatch.setattr(decoding._Child, "_ask", slow)
    asking = asyncio.ensure_future(decoder.decode(encode_rollouts(ROWS)))
    assert await asyncio.to_thread(answered.wait, 20)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    given_up.set()
    [child] = children
    process = child._process
    assert process is not None
    assert process.stdout is not None
    async with asyncio.timeout(20):
        while not process.stdout.closed:
            await asyncio.sleep(0.01)
    assert process.returncode == -signal.SIGKILL


BAD = bad_files(200_000)


async def test_bad_files_are_refused_within_a_fifth_of_a_second_of_a_childs_time() -> None:
    bounds = Bounds(rows=8, prompt_tokens=1024, completion_tokens=1280, proof_bytes=40 * 258)
    async with FileDecoder(cpu_s=0.2) as decoder:
        for name, data in BAD.items():
            with pytest.raises(EncodingError) as refused:
                await decoder.decode(data, bounds)
            assert "broke" not in str(refused.value), name


async def test_bad_files_cost_less_than_100_mb_and_odd_ones_are_read() -> None:
    bad, odd = await give(BAD.values()), await give(odd_files().values())
    assert (bad.files, bad.refused) == (len(BAD), len(BAD))
    assert 0 < bad.most_bytes < 100 << 20
    assert (odd.files, odd.refused) == (len(odd_files()), 0)


async def test_an_oversized_file_is_refused_before_the_child_sees_it(
    decoder: FileDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 10)
    with pytest.raises(EncodingError, match="exceeds the limit of 10"):
        await decoder.decode(encode_rollouts(ROWS))


async def test_a_file_larger_than_any_of_its_recipe_is_rejected_for_its_size(
    decoder: FileDecoder,
) -> None:
    ticket = client_world.make_ticket()
    rows = client_world.make_rollouts(ticket)
    claim = client_world.make_claim(client_world.make_submission(ticket, rows), ticket)
    most = bounds_of(claim, client_world.RULES, NOTHING).file_bytes
    assert most < MAX_FILE_BYTES
    for size, reason in [(most, Reason.SCHEMA), (most + 1, Reason.FILE_TOO_LARGE)]:
        found = await read_rows(claim, bytes(size), client_world.RULES, decoder, NOTHING)
        assert isinstance(found, Judgement)
        assert found.finding
        assert (found.finding.verdict, found.finding.reason) == (Verdict.REJECTED, reason)
