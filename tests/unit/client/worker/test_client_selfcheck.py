"""A worker's check of its own work before it signs."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from worlds.client_desk import Desk, run_until
from worlds.client_world import RECIPE, RULES, VERSION, HashEngine, make_rollouts, make_ticket

from muster.client.worker.generation import (
    ITEM_SAMPLES,
    LEAST_S,
    SHARE,
    require_sound,
    require_sound_policy,
)
from muster.inference import Request
from muster.inference.examining import Recomputed
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.rollouts import Rollout

ROWS = make_rollouts(make_ticket())


def check(rows: list[Rollout], engine: HashEngine | None = None) -> int:
    engine = engine or HashEngine(VERSION)
    return require_sound(rows, RULES, engine, 0.1, clock=lambda: 0.0)


def test_honest_work_is_checked_whole_where_that_takes_no_time() -> None:
    assert check(ROWS * 3) == 3 * len(ROWS)


@pytest.mark.parametrize("number", range(4))
def test_one_row_that_is_not_what_the_engine_makes_is_found(number: int) -> None:
    rows = list(ROWS)
    proofs = rows[number].proofs
    rows[number] = replace(rows[number], proofs=proofs[:-1] + bytes([proofs[-1] ^ 1]))
    with pytest.raises(EngineError, match=rf"1 strikes in (1|{len(rows)}) rows") as raised:
        check(rows)
    assert "muster doctor" in raised.value.hint


def test_proofs_that_are_none_are_found() -> None:
    rows = [replace(ROWS[0], proofs=ROWS[0].proofs[:-1]), *ROWS[1:]]
    with pytest.raises(EngineError, match="bytes of proofs"):
        check(rows)


def test_weights_of_another_version_are_found() -> None:
    with pytest.raises(EngineError, match="exponent"):
        check(ROWS, HashEngine(PolicyVersion(VERSION + 1)))


# Its cost


class Endless(HashEngine):
    """An engine that never ends by itself."""

    def _step(self, tokens: tuple[int, ...]) -> Any:
        hidden, logits = super()._step(tokens)
        logits = logits.copy()
        logits[list(self.eos_token_ids)] = -1e9
        return hidden, logits


class Dear(Endless):
    """An engine whose prefill advances its clock; longer samples take more time per token."""

    def __init__(self, token_s: float, call_s: float = 0.0) -> None:
        super().__init__(VERSION)
        self.token_s, self.call_s, self.seconds = token_s, call_s, 0.0
        self.lengths: list[int] = []

    def recompute(self, samples: Any) -> list[Recomputed]:
        self.seconds += self.call_s
        for prompt, completion in samples:
            n = len(prompt) + len(completion)
            self.seconds += self.token_s * n * (1 + n / 8192)
            self.lengths.append(len(completion))
        return super().recompute(samples)

    def check(self, rows: list[Rollout], generating_s: float) -> int:
        clock = lambda: self.seconds  # noqa: E731
        return require_sound(rows, RULES, self, generating_s, clock=clock)


@cache
def long_rows(tokens: int, count: int) -> list[Rollout]:
    """Return rows that ended at no EOS."""
    engine = Endless(VERSION)
    asked = [Request((1, 2, 3), seed, RECIPE.sampling.temperature, tokens) for seed in range(count)]
    made = engine.generate(asked, proof=RECIPE.proof)
    return [
        replace(ROWS[0], prompt_tokens=(1, 2, 3), sampling_seed=seed,
                completion_tokens=tuple(m.tokens), proofs=b"".join(m.proofs))
        for seed, m in enumerate(made)
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [16, 40, 512, 2048])
@pytest.mark.parametrize("token_s", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("call_s", [0.0, 0.2])
def test_check_takes_its_time_and_no_more(tokens: int, token_s: float, call_s: float) -> None:
    engine, rows = Dear(token_s, call_s), long_rows(tokens, 8)
    generating_s = 4 * token_s * tokens * len(rows)  # four times the prefill of the same tokens
    assert engine.check(rows, generating_s) >= 1
    chunk_s = call_s + token_s * (3 + RECIPE.proof.chunk_tokens) * 1.01
    assert engine.seconds <= max(LEAST_S, SHARE * generating_s, chunk_s)
    # It uses its whole budget.
    whole_s = sum(token_s * (3 + tokens) * (1 + (3 + tokens) / 8192) for _ in rows)
    assert engine.seconds >= min(whole_s, 0.25 * max(LEAST_S, SHARE * generating_s))


def test_what_is_small_is_checked_whole() -> None:
    engine, rows = Dear(1e-6), long_rows(40, 8)
    assert engine.check(rows, 0.1) == len(rows)
    assert sorted(engine.lengths)[1:] == [40] * len(rows)


def test_chunk_of_a_row_is_checked_however_long_that_takes() -> None:
    engine = Dear(1000.0)
    assert engine.check(long_rows(40, 8), 0.1) == 1
    assert engine.lengths == [RECIPE.proof.chunk_tokens]


def test_fault_that_every_chunk_has_is_found_in_the_least_of_checks() -> None:
    rows = [replace(row, sampling_seed=row.sampling_seed + 1) for row in long_rows(512, 8)]
    with pytest.raises(EngineError, match="1 strikes in 1 rows"):
        Dear(1000.0).check(rows, 0.1)


def test_fault_in_a_late_chunk_is_found_as_often_as_there_is_time_for() -> None:
    """There is time for a quarter of the work: the one broken row is found one time in four."""
    rows = list(long_rows(512, 8))
    size = len(rows[0].proofs) // 16
    broken = bytes([rows[3].proofs[3 * size] ^ 1])
    rows[3] = replace(
        rows[3], proofs=rows[3].proofs[: 3 * size] + broken + rows[3].proofs[3 * size + 1 :]
    )
    found = 0
    for _ in range(60):
        try:
            Dear(0.01).check(rows, 0.01 * 8 * 515 / SHARE / 4)
        except EngineError:
            found += 1
    assert 2 <= found <= 40  # a quarter of the work is recomputed: 15 expected


def test_replies_in_what_is_cut_are_not_taken_for_the_models() -> None:
    rows = [
        replace(row, replies=((4, RECIPE.proof.chunk_tokens + 4),), completion_tokens=tokens)
        for row in long_rows(512, 8)
        for tokens in [row.completion_tokens[:4] + row.completion_tokens[4:]]
    ]
    assert Dear(1000.0).check(rows, 0.1) == 1


# When a policy is loaded


def test_sound_policy_passes_and_costs_a_chunk_a_sample() -> None:
    engine = Dear(1.0)
    require_sound_policy(RULES, engine)
    assert len(engine.lengths) == ITEM_SAMPLES
    assert max(engine.lengths) <= RECIPE.proof.chunk_tokens


def test_policy_that_is_computed_in_two_ways_is_found() -> None:
    with pytest.raises(EngineError, match=rf"strikes in {ITEM_SAMPLES} rows"):
        require_sound_policy(RULES, Disturbed())


# In the loop


class Disturbed(HashEngine):
    """An engine that generates as another version would, until it loads a second time."""

    def generate(self, *args: Any, **options: Any) -> Any:
        if len(self.loaded) > 1:
            return super().generate(*args, **options)
        return HashEngine(PolicyVersion(VERSION + 1)).generate(*args, **options)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, engine=Disturbed())
    yield desk
    desk.close()


async def test_disturbed_work_is_never_signed(desk: Desk) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    with pytest.raises(EngineError, match="strikes"):
        await desk.loop.work_once()
    assert not desk.orchestrator.uploads
    assert desk.journal.signed(make_ticket()) is None


async def test_weights_are_read_again_and_the_ticket_is_worked_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.orchestrator.tickets += [make_ticket(), make_ticket()]
    with caplog.at_level(logging.WARNING):
        await run_until(desk.loop, lambda: bool(desk.orchestrator.uploads))
    assert len(desk.engine.loaded) == 2
    [said] = [r for r in caplog.records if "the engine is not available" in r.getMessage()]
    # Rows of the same tokens (an EOS at once) are one strike where another policy samples them too.
    assert re.search(r"own work fails its check: [1-4] strikes in 4 rows", vars(said)["error"])
