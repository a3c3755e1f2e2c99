"""A validator judges a known good submission, and signs nothing while this fails."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds.client_chain import FakeFetcher
from worlds.client_world import (
    RULES,
    RUN,
    VALIDATOR_KEY,
    VERSION,
    HashEngine,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import Bench, honest

from muster.chain import PauseCause
from muster.client.validator.checking_proofs import CheckingStore
from muster.client.validator.checks import FailedCheck
from muster.client.validator.context import ValidatorContext
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
    prove,
)
from muster.client.worker.generation import GRADING_ATTEMPTS
from muster.inference.examining import Recomputed
from muster.protocol.checking import fingerprints_hash
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import (
    ChainUnreachable,
    ContractRevert,
    EngineError,
    PolicyUnavailable,
    ValidatorDisturbed,
)
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Reason, Verdict
from muster.protocol.rollouts import encode_rollouts
from muster.tasks import Graded, Undecided, registry
from muster.tasks.verifier import Grade

VALIDATOR = address_of(VALIDATOR_KEY)
NO_BATCH: Any = None
NEWEST, NEWEST_ROOT = PolicyVersion(VERSION + 1), keccak(b"the newest policy")
FLAW = Flaw("generated", VERSION, FailedCheck(Verdict.FRAUD, Reason.TOPLOC_MISMATCH, "all differ"))


class Disturbed(HashEngine):
    """An engine that computes something else, the same each time: in `prefill` only, or always."""

    prefills_wrongly = False
    is_another = False
    fails_to_generate = False

    def generate(self, requests: Any, **options: Any) -> Any:
        if self.fails_to_generate:
            raise EngineError("inference failed: CUDA out of memory")
        return super().generate(requests, **options)

    def recompute(self, samples: Any) -> list[Recomputed]:
        found = super().recompute(samples)
        if not self.prefills_wrongly:
            return found
        return [Recomputed(p.hidden_TH ^ np.uint16(0x8000), p.logits_TV) for p in found]

    def _step(self, tokens: tuple[int, ...]) -> Any:
        return super()._step((*tokens, 1) if self.is_another else tokens)


class Watched(Bench):
    """A validator's loop with soundness checks; `alarms` are the flaws that paused slashing."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.engine = Disturbed()
        self.alarms: list[Flaw] = []
        self.change(engine=self.engine)

    def start(self, context: ValidatorContext) -> None:
        super().start(context)
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


async def test_an_engine_that_prefills_otherwise_signs_nothing_and_pauses_slashing(
    bench: Watched,
) -> None:
    bench.engine.prefills_wrongly = True
    batch = bench.commit_honest(1, 0)
    with pytest.raises(ValidatorDisturbed, match="fails its known-good items"):
        await bench.loop.validate(batch)
    assert bench.posts == 0
    assert bench.journal.all() == []
    (flaw,) = bench.alarms
    assert (flaw.item, flaw.version, flaw.finding.reason) == (
        "generated",
        VERSION,
        Reason.TOPLOC_MISMATCH,
    )


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


def commit_forged(bench: Watched, batch_id: int) -> Any:
    ticket = make_ticket(index=batch_id)
    rows = [replace(row, task_reward=1.0) for row in make_rollouts(ticket)]
    entry = make_entry(ticket, make_submission(ticket, rows))
    return bench.commit(batch_id, [entry], encode_rollouts(rows))


async def test_a_sound_validator_accuses(bench: Watched) -> None:
    await bench.loop.validate(commit_forged(bench, 1))
    assert [r.verdict for r in bench.posted()] == [Verdict.FRAUD]
    assert bench.alarms == []


async def test_a_judgement_that_was_not_signed_leaves_no_fingerprints(
    bench: Watched, tmp_path: Path
) -> None:
    store = CheckingStore(tmp_path / "checking")
    bench.change(checked=store)
    await bench.loop.validate(bench.commit_honest(1, 0))
    bench.seconds += BEFORE_ACCUSING_S
    batch = commit_forged(bench, 2)
    bench.engine.fails_to_generate = True
    with pytest.raises(EngineError, match="out of memory"):
        await bench.loop.validate(batch)
    bench.engine.fails_to_generate = False
    await bench.loop.validate(batch)
    assert [r.verdict for r in bench.posted()] == [Verdict.FRAUD]
    checked = store.find(batch.name)
    assert checked is not None
    assert len(checked.found) == batch.count
    committed = bench.orchestrator.commitments[-1].fingerprints_hash
    assert committed == fingerprints_hash(checked.of(VALIDATOR))


class Unusable(Disturbed):
    """An engine that cannot load the newest policy."""

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        self.policy_version = None
        if version == NEWEST:
            raise EngineError("the folder of the newest policy does not load")
        super().load_policy(folder, version)


class NeverNewest(FakeFetcher):
    """Relays that do not deliver the newest policy."""

    async def fetch(self, run_id: RunId, version: PolicyVersion, root: Hash32) -> Path:
        if version == NEWEST:
            raise PolicyUnavailable("no relay delivers it")
        return await super().fetch(run_id, version, root)


def publish_newest(bench: Watched) -> None:
    run = bench.view.runs[RUN]
    newest = vars(run.checkpoints[VERSION]) | {"version": NEWEST, "manifest_root": NEWEST_ROOT}
    run.checkpoints[NEWEST] = SimpleNamespace(**newest)
    run.latest_version = NEWEST


async def test_a_validator_that_starts_judges_earlier_versions_while_the_newest_is_unavailable(
    bench: Watched,
) -> None:
    bench.change(fetcher=NeverNewest())
    publish_newest(bench)
    await bench.loop.validate(bench.commit_honest(1, 0))
    assert [r.verdict for r in bench.posted()] == [Verdict.ACCEPTED]


async def test_earlier_versions_are_judged_after_the_newest_did_not_load(bench: Watched) -> None:
    bench.engine = Unusable()
    bench.change(engine=bench.engine)
    await bench.loop.validate(bench.commit_honest(1, 0))
    publish_newest(bench)
    entry, data = honest(make_ticket(index=1, policy_version=NEWEST, policy_root=NEWEST_ROOT))
    with pytest.raises(EngineError, match="newest"):
        await bench.loop.validate(bench.commit(2, [entry], data))
    bench.seconds += CHECK_EVERY_S
    await bench.loop.validate(bench.commit_honest(3, 2))
    assert (bench.posts, bench.alarms) == (2, [])


async def test_a_loaded_version_that_the_chain_took_back_is_not_tested(bench: Watched) -> None:
    await bench.loop.validate(bench.commit_honest(1, 0))
    run, earlier = bench.view.runs[RUN], PolicyVersion(VERSION - 1)
    run.checkpoints[earlier] = run.checkpoints.pop(VERSION)
    run.latest_version = earlier
    bench.seconds += CHECK_EVERY_S
    entry, data = honest(make_ticket(index=1, policy_version=earlier))
    await bench.loop.validate(bench.commit(2, [entry], data))
    assert (bench.posts, bench.alarms) == (2, [])
    assert [version for _, version in bench.engine.loaded] == [VERSION, earlier]


class Grader:
    """Gives every answer the same grade, until a test changes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grade: Grade) -> None:
        self.grade = grade
        self.first: Iterator[Grade] = iter(())
        """Grades before that one."""
        task_type = RULES.task_set[0].task_type
        real = registry.installed_verifiers()
        mine = replace(real[task_type], grade=lambda *_: next(self.first, self.grade))
        monkeypatch.setattr(registry, "installed_verifiers", lambda: {**real, task_type: mine})


async def test_a_grade_that_depends_on_chance_is_no_flaw(
    bench: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = Grader(monkeypatch, Graded(0.0, is_repeatable=False))
    await bench.loop.validate(bench.commit_honest(1, 0))
    bench.seconds += CHECK_EVERY_S
    grader.grade = Graded(1.0, is_repeatable=False)
    await bench.loop.validate(bench.commit_honest(2, 1))
    assert (bench.posts, bench.alarms) == (2, [])


@pytest.mark.parametrize("fault", ["prefills_wrongly", "is_another"])
async def test_a_disturbed_engine_is_found_where_grades_depend_on_chance(
    bench: Watched, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    grader = Grader(monkeypatch, Graded(0.0, is_repeatable=False))
    await bench.loop.validate(bench.commit_honest(1, 0))
    bench.seconds += CHECK_EVERY_S
    grader.grade = Graded(1.0, is_repeatable=False)
    setattr(bench.engine, fault, True)
    with pytest.raises(ValidatorDisturbed):
        await bench.loop.validate(bench.commit_honest(2, 1))
    assert bench.posts == 1


UNDECIDED = Undecided("the scorer raised ValueError")


@pytest.mark.parametrize("later", [UNDECIDED, Graded(1.0)], ids=["never", "later"])
async def test_an_own_answer_that_cannot_be_graded_is_no_flaw(
    bench: Watched, monkeypatch: pytest.MonkeyPatch, later: Grade
) -> None:
    batch = bench.commit_honest(1, 0)
    Grader(monkeypatch, later).first = iter([UNDECIDED] * GRADING_ATTEMPTS)
    await bench.loop.validate(batch)
    assert (bench.posts, bench.alarms) == (1, [])


CHANCE = [Graded(1.0, is_repeatable=False)], Graded(0.0, is_repeatable=False)
UNGRADED = [UNDECIDED] * GRADING_ATTEMPTS, UNDECIDED


@pytest.mark.parametrize(("first", "later"), [CHANCE, UNGRADED], ids=["chance", "undecided"])
@pytest.mark.parametrize("is_another", [False, True])
def test_a_self_proof_blames_the_engine_and_not_the_grades(
    monkeypatch: pytest.MonkeyPatch, first: list[Grade], later: Grade, is_another: bool
) -> None:
    Grader(monkeypatch, later).first = iter(first)
    engine: Any = HashEngine(PolicyVersion(3))
    reference: Any = HashEngine(PolicyVersion(4 if is_another else 3))
    found = prove(make_ticket(), RULES, engine, reference)
    assert (found.finding is None, bool(found.statistics)) == (not is_another, True)


async def test_a_disturbed_engine_is_found_by_answers_that_cannot_be_graded(
    bench: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.commit_honest(1, 0)
    Grader(monkeypatch, UNDECIDED)
    bench.engine.prefills_wrongly = True
    with pytest.raises(ValidatorDisturbed):
        await bench.loop.validate(batch)
    (flaw,) = bench.alarms
    assert flaw.finding.reason is Reason.TOPLOC_MISMATCH


async def test_a_repeatable_grade_that_contradicts_an_accepted_item_is_a_flaw(
    bench: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = Grader(monkeypatch, Graded(1.0))
    await bench.loop.validate(bench.commit_honest(1, 0))
    bench.seconds += CHECK_EVERY_S
    grader.grade = Graded(0.0)
    with pytest.raises(ValidatorDisturbed):
        await bench.loop.validate(bench.commit_honest(2, 1))
    (flaw,) = bench.alarms
    assert (flaw.finding.verdict, flaw.finding.reason) == (Verdict.FRAUD, Reason.WRONG_REWARD)


async def test_checks_are_rare_while_it_passes(bench: Watched) -> None:
    found: list[float] = []

    async def find_flaw(_batch: Any) -> None:
        found.append(bench.seconds)

    sound = Soundness(find_flaw, bench.alarm, clock=lambda: bench.seconds)
    for second in range(0, 1201, 100):
        bench.seconds = second
        await sound.require(CHECK_EVERY_S, NO_BATCH)
    assert found == [0, 600, 1200]


async def test_every_try_calls_the_alarm_until_it_passes(bench: Watched) -> None:
    flaws: list[Flaw | None] = [FLAW, FLAW, None]

    async def find_flaw(_batch: Any) -> Flaw | None:
        return flaws.pop(0)

    sound = Soundness(find_flaw, bench.alarm, clock=lambda: bench.seconds)
    for _ in range(2):
        with pytest.raises(ValidatorDisturbed):
            await sound.require(CHECK_EVERY_S, NO_BATCH)
        assert sound.flaw == FLAW
    await sound.require(CHECK_EVERY_S, NO_BATCH)
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
