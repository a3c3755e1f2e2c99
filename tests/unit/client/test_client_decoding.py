"""The isolated decoder: hostile files never reach the validator's own process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from muster.client.validator import decoding
from muster.client.validator.decoding import FileDecoder
from muster.protocol.errors import EncodingError, ValidatorDisturbed
from muster.protocol.rollouts import Rollout, encode_rollouts

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
        await decoder.decode(encode_rollouts(ROWS), max_rows=1)


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


async def test_a_file_that_takes_too_much_processor_time_is_refused() -> None:
    many = encode_rollouts([replace(ROW, sample=i) for i in range(4000)])
    async with FileDecoder(cpu_s=0.001) as decoder:
        with pytest.raises(EncodingError, match="broke the decoder"):
            await decoder.decode(many)


async def test_a_file_that_waits_for_ever_is_refused() -> None:
    async with FileDecoder(wall_s=0.0) as decoder:
        with pytest.raises(EncodingError, match="broke the decoder"):
            await decoder.decode(encode_rollouts(ROWS))


async def test_a_stopped_machine_is_no_fault_of_a_files() -> None:
    """Seconds in which the child may not run count for nothing."""
    async with FileDecoder(cpu_s=0.2) as decoder:
        await decoder.start()
        child = decoder._child
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        asking = asyncio.ensure_future(decoder.decode(encode_rollouts(ROWS)))
        assert not (await asyncio.wait([asking], timeout=0.3))[0]
        child.send_signal(signal.SIGCONT)
        assert await asking == ROWS


async def test_a_child_that_does_not_start_is_held_against_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for program in ("/bin/false", "/nowhere/python"):
        monkeypatch.setattr(decoding.sys, "executable", program)
        async with FileDecoder() as decoder:
            with pytest.raises(ValidatorDisturbed, match="does not start"):
                await decoder.decode(encode_rollouts(ROWS))


async def test_an_oversized_file_is_refused_before_the_child_sees_it(
    decoder: FileDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 10)
    with pytest.raises(EncodingError, match="exceeds the limit of 10"):
        await decoder.decode(encode_rollouts(ROWS))
