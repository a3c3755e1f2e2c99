"""A validator that judges what it knows to be good: it signs nothing while it fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds.client_world import (
    RULES,
    RUN,
    VALIDATOR_KEY,
    VERSION,
    HashEngine,
    make_rollouts,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import Bench, honest, make_entry

from muster.chain import PauseCause
from muster.client.validator.checks import FailedCheck
from muster.client.validator.soundness import (
    BEFORE_ACCUSING_S,
    CHECK_EVERY_S,
    SAMPLES,
    TOKENS,
    Flaw,
    Soundness,
    evidence_of,
    judge_generated,
    pausing,
)
from muster.inference.examining import Recomputed
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ChainUnreachable, ContractRevert, ValidatorDisturbed
from muster.protocol.messages import Reason, Verdict
from muster.protocol.rollouts import encode_rollouts

VALIDATOR = address_of(VALIDATOR_KEY)
FLAW = Flaw("generated", VERSION, FailedCheck(Verdict.FRAUD, Reason.TOPLOC_MISMATCH, "all differ"))


class Disturbed(HashEngine):
    """`prefill` alone computes something else, or everything does, in the same way each time."""

    prefills_wrongly = False
    is_another = False

    def recompute(self, samples: Any) -> list[Recomputed]:
        found = super().recompute(samples)
        if not self.prefills_wrongly:
            return found
        return [Recomputed(p.hidden_TH ^ np.uint16(0x8000), p.logits_TV) for p in found]

    def _step(self, tokens: tuple[int, ...]) -> Any:
        return super()._step((*tokens, 1) if self.is_another else tokens)


class Watched(Bench):
    """A validator's loop that watches itself; `alarms` are the flaws it had slashing paused for."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.engine = Disturbed()
        self.change(engine=self.engine)
        self.alarms: list[Flaw] = []
        self.loop.soundness = Soundness(self.loop.find_flaw, self.alarm, clock=lambda: self.seconds)

    async def alarm(self, flaw: Flaw) -> None:
        self.alarms.append(flaw)

    @property
    def posts(self) -> int:
        return len(self.orchestrator.outcomes)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Watched]:
    opened = Watched(tmp_path)
    yield opened
    opened.close()


def test_what_it_generates_of_itself_is_short_however_long_the_runs_samples_are() -> None:
    sampling = RULES.recipe.sampling.model_copy(update={"max_new_tokens": 32_768})
    long = replace(RULES, recipe=RULES.recipe.model_copy(update={"sampling": sampling}))
    asked: list[int] = []

    class Counting(HashEngine):
        def generate(self, requests: Any, **options: Any) -> Any:
            asked.extend(request.max_new_tokens for request in requests)
            return super().generate(requests, **options)

    assert judge_generated(make_ticket(), long, Counting(VERSION)) is None
    assert asked == [TOKENS] * SAMPLES


async def test_a_sound_validator_signs(bench: Watched) -> None:
    await bench.loop.validate(bench.commit_honest(1, 0, 1))
    assert (bench.posts, bench.alarms) == (1, [])
    assert [r.verdict for r in bench.posted()] == [Verdict.ACCEPTED, Verdict.ACCEPTED]


async def test_an_engine_that_prefills_otherwise_signs_nothing_and_pauses_slashing(
    bench: Watched,
) -> None:
    bench.engine.prefills_wrongly = True
    batch = bench.commit_honest(1, 0)
    with pytest.raises(ValidatorDisturbed, match="knows to be good"):
        await bench.loop.validate(batch)
    assert bench.posts == 0
    assert bench.journal.all() == []
    (flaw,) = bench.alarms
    assert (flaw.item, flaw.version, flaw.finding.reason) == (
        "generated",
        VERSION,
        Reason.TOPLOC_MISMATCH,
    )


async def test_it_signs_again_once_it_passes_and_what_it_signs_is_right(bench: Watched) -> None:
    bench.engine.prefills_wrongly = True
    batch = bench.commit_honest(1, 0)
    with pytest.raises(ValidatorDisturbed):
        await bench.loop.validate(batch)
    bench.engine.prefills_wrongly = False
    await bench.loop.validate(batch)
    assert [r.verdict for r in bench.posted()] == [Verdict.ACCEPTED]


async def test_nobody_is_accused_by_an_engine_disturbed_since_the_last_check(
    bench: Watched,
) -> None:
    await bench.loop.validate(bench.commit_honest(1, 0))
    bench.seconds += BEFORE_ACCUSING_S
    assert BEFORE_ACCUSING_S < CHECK_EVERY_S
    bench.engine.prefills_wrongly = True
    batch = bench.commit_honest(2, 1)
    with pytest.raises(ValidatorDisturbed):
        await bench.loop.validate(batch)
    assert (bench.posts, len(bench.journal.all())) == (1, 1)
    bench.engine.prefills_wrongly = False
    await bench.loop.validate(batch)
    assert [r.verdict for r in bench.posted()] == [Verdict.ACCEPTED]


async def test_an_engine_that_is_wrong_in_the_same_way_each_time_fails_what_it_accepted(
    bench: Watched,
) -> None:
    await bench.loop.validate(bench.commit_honest(1, 0))
    bench.seconds += CHECK_EVERY_S
    bench.engine.is_another = True
    with pytest.raises(ValidatorDisturbed):
        await bench.loop.validate(bench.commit_honest(2, 1))
    (flaw,) = bench.alarms
    assert flaw.item == "accepted: batch 1, position 0"
    assert bench.posts == 1


async def test_an_accepted_item_that_is_gone_counts_for_nothing(bench: Watched) -> None:
    await bench.loop.validate(bench.commit_honest(1, 0))
    bench.seconds += CHECK_EVERY_S
    bench.orchestrator.files.clear()
    entry, data = honest(make_ticket(index=1))
    await bench.loop.validate(bench.commit(2, [entry], data))
    assert (bench.posts, bench.alarms) == (2, [])


async def test_a_sound_validator_accuses(bench: Watched) -> None:
    ticket = make_ticket(index=0)
    rows = [replace(row, task_reward=1.0) for row in make_rollouts(ticket)]
    entry = make_entry(ticket, make_submission(ticket, rows))
    await bench.loop.validate(bench.commit(1, [entry], encode_rollouts(rows)))
    assert [r.verdict for r in bench.posted()] == [Verdict.FRAUD]
    assert bench.alarms == []


async def test_checks_are_rare_while_it_passes(bench: Watched) -> None:
    found: list[float] = []

    async def find_flaw() -> None:
        found.append(bench.seconds)

    sound = Soundness(find_flaw, bench.alarm, clock=lambda: bench.seconds)
    for second in range(0, 1201, 100):
        bench.seconds = second
        await sound.require(CHECK_EVERY_S)
    assert found == [0, 600, 1200]


async def test_every_try_calls_the_alarm_until_it_passes(bench: Watched) -> None:
    flaws: list[Flaw | None] = [FLAW, FLAW, None]

    async def find_flaw() -> Flaw | None:
        return flaws.pop(0)

    sound = Soundness(find_flaw, bench.alarm, clock=lambda: bench.seconds)
    for _ in range(2):
        with pytest.raises(ValidatorDisturbed):
            await sound.require(CHECK_EVERY_S)
        assert sound.flaw == FLAW
    await sound.require(CHECK_EVERY_S)
    assert (sound.flaw, bench.alarms) == (None, [FLAW, FLAW])


# the pause on chain


class Runs:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    async def pause_slashing(self, *args: Any) -> object:
        self.calls.append(args)
        if self.error is not None:
            raise self.error
        return object()


async def test_the_pause_carries_the_hash_of_kept_evidence(tmp_path: Path) -> None:
    runs = Runs()
    chain: Any = SimpleNamespace(runs=runs)
    await pausing(chain, RUN, VALIDATOR, tmp_path / "flaws")(FLAW)
    document = evidence_of(FLAW, RUN, VALIDATOR)
    assert runs.calls == [(RUN, PauseCause.KNOWN_GOOD_ITEM, 60, keccak(document))]
    kept = (tmp_path / "flaws" / f"{hex0x(keccak(document))}.json").read_bytes()
    assert kept == document
    assert json.loads(kept)["reason"] == "TOPLOC_MISMATCH"


@pytest.mark.parametrize(
    "error",
    [
        ContractRevert("RunPauseTooSoon"),
        ContractRevert("RunUnauthorized"),
        ChainUnreachable("no answer"),
    ],
)
async def test_a_pause_that_fails_does_not_end_the_validator(
    tmp_path: Path, error: Exception
) -> None:
    chain: Any = SimpleNamespace(runs=Runs(error))
    await pausing(chain, RUN, VALIDATOR, tmp_path)(FLAW)
