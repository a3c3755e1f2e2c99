"""A validator without memory, disk or processes judges nothing; once it has them, it judges all."""

import errno
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from worlds.client_world import (
    RULES,
    VALIDATOR_KEY,
    VERSION,
    HashEngine,
    make_claim,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import ACCEPTED, Bench, PlainDecoder

from muster.client.disputes.rerun import recompute
from muster.client.outage import SURVIVED
from muster.client.validator.judging import examine
from muster.inference.examining import Recomputed
from muster.protocol.eip712 import address_of
from muster.protocol.errors import EngineError, SampleUnfit
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Reason, Verdict
from muster.protocol.prompts import Prompt
from muster.protocol.rollouts import Bounds, Rollout, encode_rollouts

TICKET = make_ticket()
ROWS = make_rollouts(TICKET)
CLAIM = make_claim(make_submission(TICKET, ROWS), TICKET)


class Panic(BaseException):
    """The error of a panicking Rust library; pyo3's own class cannot be imported."""

    __module__ = "pyo3_runtime"


TROUBLES: dict[str, Callable[[], BaseException]] = {
    "no memory": MemoryError,
    "no memory in torch": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "no memory on the device": lambda: EngineError("inference failed: CUDA out of memory"),
    "a process that died": lambda: EngineError("vLLM's process failed 3 times in a row"),
    "a full disk": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "a broken disk": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "no threads": lambda: RuntimeError("can't start new thread"),
    "a panic of the tokenizer": lambda: Panic("memory allocation of 64 bytes failed"),
}


class Machine:
    """Fails as a test says: always with one trouble, or randomly with any."""

    def __init__(self) -> None:
        self.trouble: Callable[[], BaseException] | None = None
        self.coin: Random | None = None

    def strain(self) -> None:
        """Raise the trouble, or do nothing."""
        if self.trouble is not None:
            raise self.trouble()
        if self.coin is not None and self.coin.random() < 0.15:
            raise self.coin.choice(list(TROUBLES.values()))()


class Strained(HashEngine):
    """An engine on such a machine."""

    def __init__(self, machine: Machine, version: PolicyVersion | None = None) -> None:
        super().__init__(version)
        self.machine = machine

    def recompute(self, samples: Any) -> list[Recomputed]:
        self.machine.strain()
        return super().recompute(samples)

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
        self.machine.strain()
        return super().encode(text, is_start=is_start)


class StrainedDecoder(PlainDecoder):
    """A decoder on such a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    async def decode(self, data: bytes, bounds: Bounds) -> list[Rollout]:
        self.machine.strain()
        return await super().decode(data, bounds)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    opened = Bench(tmp_path)
    machine = Machine()
    opened.engine = Strained(machine)
    opened.change(engine=opened.engine, decoder=StrainedDecoder(machine))
    yield opened
    opened.close()


def machine_of(bench: Bench) -> Machine:
    assert isinstance(bench.engine, Strained)
    return bench.engine.machine


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_nobody_is_judged_on_a_machine_in_trouble_and_everybody_after_it(
    bench: Bench, trouble: str
) -> None:
    batch = bench.commit_honest(1, 0, 1)
    machine_of(bench).trouble = TROUBLES[trouble]
    for _ in range(3):
        with pytest.raises(EngineError):
            await bench.loop.validate(batch)
    assert (bench.orchestrator.outcomes, bench.journal.all()) == ([], [])
    machine_of(bench).trouble = None
    await bench.loop.validate(batch)
    assert [(r.verdict, r.reason) for r in bench.posted()] == [ACCEPTED, ACCEPTED]


class Dying(HashEngine):
    """An engine whose process dies once, and with it the policy."""

    dies = False

    def recompute(self, samples: Any) -> list[Recomputed]:
        if self.dies:
            self.dies, self.policy_version = False, None
            raise EngineError("the engine's process died and did not start again")
        if self.policy_version is None:
            raise EngineError("no policy is loaded")
        return super().recompute(samples)


async def test_a_policy_that_the_engine_lost_is_loaded_again(bench: Bench) -> None:
    engine = Dying()
    bench.change(engine=engine)
    await bench.loop.validate(bench.commit_honest(1, 0))
    engine.dies = True
    batch = bench.commit_honest(2, 1)
    with pytest.raises(EngineError):
        await bench.loop.validate(batch)
    await bench.loop.validate(batch)
    assert [(r.verdict, r.reason) for r in bench.posted()] == [ACCEPTED]
    assert [version for _, version in engine.loaded] == [VERSION, VERSION]


@pytest.mark.parametrize("tries", [50, pytest.param(300, marks=pytest.mark.slow)])
async def test_on_a_failing_machine_the_honest_pass_and_the_dishonest_are_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    machine_of(bench).coin = coin = Random(23)
    fsync, disturbances = os.fsync, 0

    def filling_disk(descriptor: int) -> None:
        if coin.random() < 0.1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", filling_disk)
    for i in range(tries):
        batch, expected = commit_one(bench, i, forges=i % 10 == 9)
        while bench.journal.judged(batch.name) is None:
            try:
                await bench.loop.validate(batch)
            except SURVIVED:
                disturbances += 1
        judged = bench.journal.judged(batch.name)
        assert judged is not None
        assert [(r.verdict, r.reason) for r in judged.records] == [expected], i
    assert disturbances > tries / 3


def commit_one(bench: Bench, index: int, *, forges: bool) -> tuple[Any, tuple[Verdict, Reason]]:
    """Commit a submission, honest or with inverted rewards; return its right verdict."""
    ticket = make_ticket(index=index)
    rows = make_rollouts(ticket)
    if forges:
        rows = [replace(row, task_reward=1.0 - row.task_reward) for row in rows]
    entry = make_entry(ticket, make_submission(ticket, rows))
    deserved = (Verdict.FRAUD, Reason.WRONG_REWARD) if forges else ACCEPTED
    return bench.commit(index + 1, [entry], encode_rollouts(rows)), deserved


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_juror_or_an_audit_in_trouble_contradicts_nobody(trouble: str) -> None:
    machine = Machine()
    machine.trouble = TROUBLES[trouble]
    engine = Strained(machine, VERSION)
    work = CLAIM, encode_rollouts(ROWS), RULES, engine, PlainDecoder()
    with pytest.raises(EngineError):
        await recompute(*work)  # type: ignore[arg-type]
    machine.trouble = None
    assert (await recompute(*work)).record.verdict is Verdict.ACCEPTED  # type: ignore[arg-type]


def test_where_memory_is_short_smaller_parts_give_the_same_fingerprints() -> None:
    class Small(HashEngine):
        largest = 0

        def recompute(self, samples: Any) -> list[Recomputed]:
            if len(samples) > 1:
                raise EngineError("inference failed: out of memory")
            self.largest = max(self.largest, len(samples))
            return super().recompute(samples)

    seats, small = [address_of(VALIDATOR_KEY)], Small(VERSION)
    claim = CLAIM
    found = examine(claim, ROWS, RULES, small, seats)  # type: ignore[arg-type]
    whole = examine(claim, ROWS, RULES, HashEngine(VERSION), seats)  # type: ignore[arg-type]
    assert (found.finding, small.largest) == (None, 1)
    assert found.fingerprints == whole.fingerprints


def test_a_sample_that_fits_no_machine_is_rejected() -> None:
    class Narrow(HashEngine):
        def recompute(self, samples: Any) -> list[Recomputed]:
            raise SampleUnfit(f"{len(samples)} samples are beyond the context")

    found = examine(CLAIM, ROWS, RULES, Narrow(VERSION)).finding  # type: ignore[arg-type]
    assert found is not None
    assert (found.verdict, found.reason) == (Verdict.REJECTED, Reason.TOPLOC_MISMATCH)


class Nonsense(HashEngine):
    """An engine whose prefill is NaN: always, or only for certain tokens."""

    of: tuple[int, ...] | None = None

    def recompute(self, samples: Any) -> list[Recomputed]:
        made = super().recompute(samples)
        for (_, completion), computed in zip(samples, made, strict=True):
            if self.of is None or tuple(completion) == self.of:
                computed.hidden_TH[:] = 0x7FC0
        return made


async def test_an_engine_that_computes_no_numbers_judges_nobody() -> None:
    work = CLAIM, encode_rollouts(ROWS), RULES, Nonsense(VERSION), PlainDecoder()
    with pytest.raises(EngineError, match="nonsense"):
        await recompute(*work)  # type: ignore[arg-type]


async def test_a_sample_without_numbers_on_a_sound_engine_is_rejected() -> None:
    engine = Nonsense(VERSION)
    engine.of = ROWS[0].completion_tokens
    other = make_rollouts(make_ticket(index=1))
    assert engine.of not in [row.completion_tokens for row in other]
    work = CLAIM, encode_rollouts(ROWS), RULES, engine, PlainDecoder()
    record = (await recompute(*work)).record  # type: ignore[arg-type]
    assert (record.verdict, record.reason) == (Verdict.REJECTED, Reason.TOPLOC_MISMATCH)
