"""Check 7 over a worker's submissions: a bias within the margin is a strike, then fraud."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from worlds.cases import ACCEPTED, STRANGER, make_case
from worlds.client_chain import WORKER_ID, make_batch
from worlds.client_world import (
    CALIBRATION,
    DOMAIN,
    RECIPE,
    ROOT,
    RULES,
    RUN,
    TASK_SET,
    VALIDATOR_KEY,
    VERSION,
    HashEngine,
    make_entry,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import Bench, PlainDecoder

from muster.chain import ClaimView
from muster.client.juror.judging import CaseJudge
from muster.client.validator.records import ConductStore, is_drawn
from muster.client.worker.generation import play_ticket
from muster.inference.examining import Recomputed
from muster.lab.simulator.machines import Hidden
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.jury import Ruling
from muster.protocol.merkle import batch_root
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.rollouts import encode_rollouts
from muster.toploc.calibration import SamplerLimits
from muster.toploc.sequential_test import HistoryLimits

LOOSE = CALIBRATION.model_copy(
    update={
        "sampler": SamplerLimits(margin=2.0, max_outside_per_sample=0),
        "history": HistoryLimits(honest_strain=0.5, honest_loss=0.05),
    }
)
"""A margin as wide as a small bfloat16 model's."""
STRUCK = (Verdict.REJECTED, Reason.SAMPLER_DRIFT)
FRAUD = (Verdict.FRAUD, Reason.SAMPLER_DRIFT)
PASSED = (Verdict.ACCEPTED, Reason.NONE)
MOST = 60


class Leaning(HashEngine):
    """Prefers EOS by less than the margin; its hidden states are the policy's."""

    def _step(self, tokens: tuple[int, ...]) -> Hidden:
        hidden, logits = super()._step(tokens)
        return hidden, logits + 1.5 * (np.arange(self.vocab_size) == self.vocab_size - 1)


class Rounded(HashEngine):
    """An honest worker with other arithmetic: each logit has a small error of either sign."""

    def _step(self, tokens: tuple[int, ...]) -> Hidden:
        hidden, logits = super()._step(tokens)
        random = np.random.default_rng(abs(hash(tokens)))
        return hidden, logits + random.normal(size=len(logits)).astype(np.float32) * 0.03


class Scene(Bench):
    """A validator with records of earlier work, and an engine's submissions to it."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.folder = state / "conduct"
        self.remembers(self.folder)
        self.data: dict[int, tuple[Any, bytes]] = {}

    def remembers(self, folder: Path) -> None:
        rules = replace(RULES, calibration=LOOSE)
        self.change(rules=rules, conducts=ConductStore(folder, LOOSE))

    async def submit(self, batch_id: int, engine: HashEngine) -> tuple[Verdict, Reason]:
        """Return the outcome of a batch of one submission, and post it."""
        ticket = make_ticket(index=batch_id)
        rows = play_ticket(ticket, RECIPE, TASK_SET, engine).graded()  # type: ignore[arg-type]
        submission = make_submission(ticket, rows)
        entry = make_entry(ticket, submission)
        batch = self.commit(batch_id, [entry], encode_rollouts(rows))
        self.data[batch_id] = entry, encode_rollouts(rows)
        (record,) = await self.loop.judge(batch)
        batch.records, batch.posted_block = [record], batch.block_number
        return record.verdict, record.reason

    async def until(self, wanted: tuple[Verdict, Reason], first: int, engine: HashEngine) -> int:
        """Return the batch in which an outcome comes first; all before it are accepted."""
        for batch_id in range(first, first + MOST):
            found = await self.submit(batch_id, engine)
            if found == wanted:
                return batch_id
            assert found == PASSED
        raise AssertionError(f"{wanted} never comes")

    def evidence_of(self, batch_id: int) -> dict[str, Any]:
        name = self.data[batch_id][0].submission.file_hash.hex()
        found: dict[str, Any] = json.loads(
            (self.evidence / name / f"{batch_id}-0.json").read_text()
        )
        return found

    async def rule(self, batch_id: int) -> tuple[Ruling, dict[str, Any]]:
        """Return the finding of a juror without earlier measurements."""
        config = self.view.runs[RUN].config
        config.recipe_hash, config.calibration_hash = RECIPE.hash(), LOOSE.hash()
        config.task_set_hash = TASK_SET.hash()
        entry, _ = self.data[batch_id]
        shown = entry.model_dump_json().encode()
        answers = {
            f"/v1/work/{hex0x(entry.submission.leaf())}": shown,
            **{f"/v1/documents/{hex0x(d.hash())}": d.to_bytes() for d in (RECIPE, LOOSE, TASK_SET)},
            **{f"/v1/files/{hex0x(e.submission.file_hash)}": d for e, d in self.data.values()},
        }

        def answer(request: httpx.Request) -> httpx.Response:
            data = answers.get(request.url.path)
            stream = httpx.ByteStream(data or b"")
            return httpx.Response(404) if data is None else httpx.Response(200, stream=stream)

        judge = CaseJudge(
            view=self.view,
            key=VALIDATOR_KEY,
            domain=DOMAIN,
            engine=HashEngine(VERSION),  # type: ignore[arg-type]
            decoder=PlainDecoder(),  # type: ignore[arg-type]
            folder=self.evidence,
            sources=["http://orchestrator.example"],
            transport=httpx.MockTransport(answer),
            _loaded=(RUN, VERSION, ROOT),
        )
        claim = ClaimView(STRANGER, ACCEPTED.number, entry.submission, entry.signature, (), "0x")
        case = replace(make_case(recorded=ACCEPTED.number, claims=[claim]), batch_id=batch_id)
        return await judge.judge(case)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    opened = Scene(tmp_path)
    yield opened
    opened.close()


async def test_who_leans_to_eos_is_struck_and_then_a_fraud_and_a_juror_agrees(scene: Scene) -> None:
    struck = await scene.until(STRUCK, 1, Leaning(VERSION))
    assert struck <= 45
    assert scene.evidence_of(struck)["earlier"] == [[n, 0] for n in range(1, struck)]
    fraud = await scene.until(FRAUD, struck + 1, Leaning(VERSION))
    # Nothing from before the strike counts twice.
    assert scene.evidence_of(fraud)["earlier"] == [[n, 0] for n in range(struck + 1, fraud)]
    for batch_id, outcome in ((struck, STRUCK), (fraud, FRAUD)):
        ruling, found = await scene.rule(batch_id)
        assert ruling == Ruling(*outcome)
        assert "evidence" in found["detail"]


async def test_honest_worker_of_another_arithmetic_is_accepted_all_the_time(scene: Scene) -> None:
    found = [await scene.submit(n, Rounded(VERSION)) for n in range(1, MOST)]
    assert set(found) == {PASSED}
    conducts = list((scene.evidence.parent / "conduct").rglob("*.json"))
    assert len(conducts) == MOST - 1
    assert any('"groups": [[[' in path.read_text() for path in conducts)  # some choices differed


async def test_validator_without_the_worker_s_past_accepts(scene: Scene, tmp_path: Path) -> None:
    struck = await scene.until(STRUCK, 1, Leaning(VERSION))
    scene.remembers(tmp_path / "another")
    assert await scene.submit(struck + 1, Leaning(VERSION)) == PASSED


async def test_what_is_remembered_survives_a_restart(scene: Scene, tmp_path: Path) -> None:
    for batch_id in range(1, 6):
        await scene.submit(batch_id, Leaning(VERSION))
    scene.remembers(tmp_path / "conduct")
    await scene.submit(6, Leaning(VERSION))
    assert len(list((tmp_path / "conduct").rglob("*.json"))) == 6


async def test_batches_that_the_chain_lost_do_not_count(scene: Scene) -> None:
    struck = await scene.until(STRUCK, 1, Leaning(VERSION))
    for batch_id in range(1, struck):
        scene.view.batches[batch_id].root = keccak(b"another")
    assert await scene.submit(struck + 1, Leaning(VERSION)) == PASSED


class Meanwhile(HashEngine):
    """An engine during whose examination something happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def recompute(self, samples: Any) -> list[Recomputed]:
        self._happens()
        return super().recompute(samples)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_batch_that_the_chain_takes_back_meanwhile_is_judged_to_its_end(
    scene: Scene, is_replaced: bool
) -> None:
    another = {1: make_batch(1, [make_submission(make_ticket(index=9), [])])}

    def reorganise() -> None:
        scene.view.batches.clear()
        scene.view.batches.update(another if is_replaced else {})

    scene.change(engine=Meanwhile(reorganise))
    await scene.submit(1, HashEngine(VERSION))
    (stored,) = (scene.folder / str(WORKER_ID)).glob("1-0.json")
    root = batch_root([scene.data[1][0].submission.leaf()])
    assert json.loads(stored.read_text())["root"] == hex0x(root)


async def test_juror_acquits_whose_other_submissions_are_honest(scene: Scene) -> None:
    for batch_id in range(1, 5):
        await scene.submit(batch_id, HashEngine(VERSION))
    batch = scene.view.batches[4]
    (record,) = batch.records
    batch.records = [replace(record, verdict=STRUCK[0], reason=STRUCK[1])]
    ruling, found = await scene.rule(4)
    assert ruling == Ruling(*PASSED)
    assert found["detail"] == "4 submissions of its worker are like honest ones"


async def test_one_place_of_a_batch_is_judged_by_history(scene: Scene) -> None:
    struck = await scene.until(STRUCK, 1, Leaning(VERSION))
    made = []
    for index in range(5):
        ticket = make_ticket(index=1000 + index)
        rows = play_ticket(ticket, RECIPE, TASK_SET, Leaning(VERSION)).graded()  # type: ignore[arg-type]
        made.append((make_entry(ticket, make_submission(ticket, rows)), encode_rollouts(rows)))
    # A strike that is not posted yet: the evidence stays, and decides at most one of the five.
    scene.view.batches[struck].posted_block = None
    batch = scene.commit(struck + 1, [e for e, _ in made], *[d for _, d in made])
    records: list[OutcomeRecord] = await scene.loop.judge(batch)
    drawn = [position for position in range(5) if is_drawn(batch, position)]
    assert len(drawn) == 1
    assert [n for n, r in enumerate(records) if r.reason is Reason.SAMPLER_DRIFT] == drawn
