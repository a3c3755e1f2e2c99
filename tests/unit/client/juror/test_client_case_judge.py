"""A juror's judge: its ruling about the work that sources show, even if they lie."""

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from worlds.cases import ACCEPTED, ME, STRANGER, make_case
from worlds.client_chain import make_batch, make_view
from worlds.client_world import (
    CALIBRATION,
    DOMAIN,
    OTHER_KEY,
    RECIPE,
    ROOT,
    RUN,
    TASK_SET,
    VALIDATOR_KEY,
    VERSION,
    HashEngine,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
    sign_submission,
    sign_ticket,
)
from worlds.judge_world import build_judge
from worlds.validator_bench import PlainDecoder

from muster.api import BatchEntry
from muster.chain import CaseView, ClaimView, LeasedWork
from muster.client.chain_facts import OutcomePlace
from muster.client.connections import make_engine
from muster.client.juror import judging
from muster.client.juror.duty import require_place
from muster.client.juror.judging import TURN_S, CaseJudge
from muster.client.settings import JurorSettings
from muster.inference.vllm.engine import ProcessEngine
from muster.lifecycle import total_memory_bytes
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import (
    ApiError,
    ConfigError,
    EngineError,
    TaskError,
    ValidatorDisturbed,
)
from muster.protocol.ids import PolicyVersion
from muster.protocol.jury import BenchPlace, Ruling, summons_of
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.tasks import Grade, Problem, exact_match, identities, registry
from muster.toploc import build_proofs


def proofs_of(row: Rollout, engine: HashEngine) -> bytes:
    """Return the proofs of a completion under the engine's policy."""
    (computed,) = engine.recompute([(row.prompt_tokens, row.completion_tokens)])
    return b"".join(build_proofs(computed.hidden_TH, chunk_tokens=4, topk=8))


ROWS = make_rollouts(make_ticket())
FORGED = [replace(row, task_reward=1.0 - row.task_reward) for row in ROWS]
RESEEDED = [replace(row, sampling_seed=row.sampling_seed + 1) for row in ROWS]
REPLIED = [replace(ROWS[0], replies=((1, 2),)), *ROWS[1:]]
UNPROVEN = [replace(row, proofs=proofs_of(row, HashEngine())) for row in ROWS]
URL = "http://orchestrator.example"


def entry_with(rows: list[Rollout], **changes: Any) -> BatchEntry:
    """Return an entry of the honest worker's ticket."""
    return make_entry(make_ticket(), make_submission(make_ticket(), rows), **changes)


class World:
    """A judged batch of one submission, a claim about it, and what sources answer by path."""

    def __init__(
        self, folder: Path, rows: list[Rollout], recorded: Ruling, *, missing_units: int = 0
    ) -> None:
        self.folder = folder
        self.entry = entry_with(rows)
        submission = self.entry.submission
        record = OutcomeRecord(
            5, submission.step, submission.index, submission.policy_version,
            submission.file_hash, submission.rollouts, submission.units,
            recorded.verdict, recorded.reason,
        )  # fmt: skip
        self.batch = make_batch(1, [submission], [record])
        self.batch.units -= missing_units
        self.view = make_view()
        self.view.batches = {1: self.batch}
        config = self.view.runs[RUN].config
        config.recipe_hash, config.calibration_hash = RECIPE.hash(), CALIBRATION.hash()
        config.task_set_hash = TASK_SET.hash()
        self.answers: dict[str, bytes] = {
            f"/v1/files/{hex0x(submission.file_hash)}": encode_rollouts(rows),
            f"/v1/documents/{hex0x(RECIPE.hash())}": RECIPE.to_bytes(),
            f"/v1/documents/{hex0x(CALIBRATION.hash())}": CALIBRATION.to_bytes(),
            f"/v1/documents/{hex0x(TASK_SET.hash())}": TASK_SET.to_bytes(),
        }
        self.show(self.entry)
        signed = ClaimView(STRANGER, ACCEPTED.number, submission, self.entry.signature, (), "0x")
        self.case = make_case(recorded=recorded.number, claims=[signed])

    def show(self, entry: BatchEntry) -> None:
        """Have sources show this entry for the work, and in the batch."""
        shown = json.loads(entry.model_dump_json())
        leaf = hex0x(self.entry.submission.leaf())
        batch = {"batch_id": 1, "root": leaf, "count": 1, "submissions": [shown]}
        self.answers[f"/v1/work/{leaf}"] = json.dumps(shown).encode()
        self.answers["/v1/batches/1"] = json.dumps(batch).encode()

    def answer(self, request: httpx.Request) -> httpx.Response:
        data = self.answers.get(request.url.path)
        if data is None:
            return httpx.Response(404)
        return httpx.Response(200, stream=httpx.ByteStream(data))

    async def rule(self) -> tuple[Ruling, dict[str, Any]]:
        return await self.judge().judge(self.case)

    def judge(self) -> CaseJudge:
        return CaseJudge(
            view=self.view,
            key=VALIDATOR_KEY,
            domain=DOMAIN,
            engine=HashEngine(VERSION),  # type: ignore[arg-type]
            decoder=PlainDecoder(),  # type: ignore[arg-type]
            folder=self.folder,
            sources=[URL],
            transport=httpx.MockTransport(self.answer),
            _loaded=(RUN, VERSION, ROOT),
        )


REJECTED = Ruling(Verdict.REJECTED, Reason.LATE)
DRIFT = Ruling(Verdict.REJECTED, Reason.SAMPLER_DRIFT)
FRAUD = Ruling(Verdict.FRAUD, Reason.WRONG_REWARD)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    return lambda rows, recorded, **options: World(tmp_path, rows, recorded, **options)  # type: ignore[return-value]


def pin(shown: World, version: str | None) -> World:
    """Have the run pin the verifier that is here, or another version of it."""
    change = {} if version is None else {"version": version}
    pinned = tuple(each.model_copy(update=change) for each in identities(["exact_match"]))
    recipe = RECIPE.model_copy(update={"verifiers": pinned})
    shown.view.runs[RUN].config.recipe_hash = recipe.hash()
    shown.answers[f"/v1/documents/{hex0x(recipe.hash())}"] = recipe.to_bytes()
    return shown


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ROWS, ACCEPTED),
        (FORGED, FRAUD),
        (REPLIED, Ruling(Verdict.FRAUD, Reason.WRONG_REPLY)),
    ],
    ids=["honest", "reward", "reply"],
)
async def test_ruling_that_verifiers_decide_needs_those_of_the_run(
    world: Any, rows: list[Rollout], expected: Ruling
) -> None:
    assert (await pin(world(rows, ACCEPTED), None).rule())[0] == expected
    judge = (shown := pin(world(rows, ACCEPTED), "0")).judge()
    with pytest.raises(TaskError, match="by exact_match 0"):
        await judge.judge(shown.case)
    judge.engine = None  # type: ignore[assignment]
    with pytest.raises(TaskError, match="by exact_match 0"):
        await judge.judge(shown.case)  # the next try does not recompute


@pytest.mark.parametrize("version", [None, "0"])
@pytest.mark.parametrize(
    ("rows", "units", "expected"),
    [
        (RESEEDED, {}, Ruling(Verdict.FRAUD, Reason.WRONG_SEED)),
        (UNPROVEN, {}, Ruling(Verdict.FRAUD, Reason.TOPLOC_MISMATCH)),
        (ROWS[:2], {}, Ruling(Verdict.INCOMPLETE, Reason.FILE_INCOMPLETE)),
        (ROWS, {"missing_units": 1}, Ruling(Verdict.REJECTED, Reason.BATCH_MISDECLARED)),
    ],
    ids=["seed", "proofs", "incomplete", "misdeclared"],
)
async def test_ruling_that_no_verifier_decides_needs_none_of_the_run(
    world: Any, version: str | None, rows: list[Rollout], units: dict[str, int], expected: Ruling
) -> None:
    # Else a run that pins a Python that no juror has could accept forged work.
    recorded = expected if units else ACCEPTED
    assert (await pin(world(rows, recorded, **units), version).rule())[0] == expected


@pytest.mark.parametrize(
    ("rows", "expected"), [(ROWS, ACCEPTED), (FORGED, FRAUD)], ids=["honest", "forged"]
)
@pytest.mark.parametrize("recorded", [REJECTED, ACCEPTED, FRAUD], ids=str)
async def test_ruling_follows_from_the_work_whatever_is_recorded(
    world: Any, rows: list[Rollout], expected: Ruling, recorded: Ruling
) -> None:
    ruling, result = await world(rows, recorded).rule()
    assert ruling == expected
    assert (result["verdict"], result["reason"]) == (expected.verdict.name, expected.reason.name)


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket": None, "ticket_signature": None},
        {"ticket_signature": sign_ticket(make_ticket(), OTHER_KEY)},
        {"ticket_signature": b"\x01" * 65},
    ],
    ids=["no ticket", "another's", "garbage"],
)
async def test_work_shown_with_a_worse_ticket_is_not_judged_by_it(
    world: Any, changes: dict[str, Any]
) -> None:
    shown = world(ROWS, REJECTED)
    shown.show(entry_with(ROWS, **changes))
    with pytest.raises(ApiError, match="its signatures or its ticket are invalid"):
        await shown.rule()


async def test_signature_that_the_chain_saw_counts_and_not_the_one_shown(world: Any) -> None:
    shown = world(ROWS, REJECTED)
    shown.show(entry_with(ROWS, signature=sign_submission(shown.entry.submission, OTHER_KEY)))
    assert (await shown.rule())[0] == ACCEPTED
    [claim] = shown.case.claims
    by_another = sign_submission(shown.entry.submission, OTHER_KEY)
    shown.case.claims = [replace(claim, node_signature=by_another)]
    assert (await shown.rule())[0] == Ruling(Verdict.REJECTED, Reason.BAD_SIGNATURE)


async def test_signature_of_a_key_that_was_given_up_harms_nobody_if_a_source_shows_the_nodes(
    world: Any,
) -> None:
    shown = world(ROWS, ACCEPTED)
    [claim] = shown.case.claims
    by_old_key = sign_submission(shown.entry.submission, OTHER_KEY)
    shown.case.claims = [replace(claim, node_signature=by_old_key)]
    assert (await shown.rule())[0] == ACCEPTED
    shown.case.claims.append(claim)
    shown.show(entry_with(ROWS, signature=by_old_key))
    assert (await shown.rule())[0] == ACCEPTED
    shown.case.claims.pop()
    assert (await shown.rule())[0] == Ruling(Verdict.REJECTED, Reason.BAD_SIGNATURE)


@pytest.mark.parametrize("changes", [{"rollouts": 17}, {"units": 1}])
async def test_submission_of_the_batch_is_judged_and_not_another_that_a_claim_shows(
    world: Any, changes: dict[str, int]
) -> None:
    shown = world(ROWS, ACCEPTED)
    [claim] = shown.case.claims
    other = replace(claim.submission, **changes)
    shown.case.claims = [replace(claim, submission=other, node_signature=sign_submission(other))]
    assert (await shown.rule())[0] == ACCEPTED


async def test_work_that_the_record_does_not_name_is_not_judged_in_its_place(world: Any) -> None:
    hidden = world(ROWS, FRAUD)
    forged = entry_with(FORGED)
    other = replace(forged.submission, index=forged.submission.index + 1)
    leaf, shown = hex0x(other.leaf()), json.loads(forged.model_dump_json())
    shown["submission"] = other.to_json()
    hidden.batch.root = other.leaf()
    batch = {"batch_id": 1, "root": leaf, "count": 1, "submissions": [shown]}
    hidden.answers["/v1/batches/1"] = json.dumps(batch).encode()
    assert (await hidden.rule())[0] == ACCEPTED


async def test_sources_of_many_claims_do_not_crowd_out_those_of_another(world: Any) -> None:
    shown = world(ROWS, REJECTED)
    [claim] = shown.case.claims
    strangers = [
        replace(claim, sources=tuple(f"http://s{i}.example:{80 + n}" for n in range(16)))
        for i in range(5)
    ]
    shown.case.claims = [*strangers, replace(claim, sources=("http://honest.example",))]

    def answer(request: httpx.Request) -> httpx.Response:
        is_honest = request.url.host == "honest.example"
        return shown.answer(request) if is_honest else httpx.Response(404)

    judge = shown.judge()
    judge.sources, judge.allows_private = (), True
    judge.transport = httpx.MockTransport(answer)
    assert (await judge.judge(shown.case))[0] == ACCEPTED


@pytest.mark.parametrize("lost", ["files", "work", "documents"])
async def test_what_nobody_shows_is_no_ruling(world: Any, lost: str) -> None:
    shown = world(ROWS, REJECTED)
    shown.answers = {path: data for path, data in shown.answers.items() if lost not in path}
    with pytest.raises(ApiError, match="no source shows"):
        await shown.rule()


async def test_file_that_is_not_the_one_on_chain_is_no_ruling(world: Any) -> None:
    shown = world(ROWS, REJECTED)
    path = f"/v1/files/{hex0x(shown.entry.submission.file_hash)}"
    shown.answers[path] = encode_rollouts(FORGED)
    with pytest.raises(ApiError, match="its file has another hash"):
        await shown.rule()


@pytest.mark.parametrize(("missing_units", "accepts"), [(0, True), (1, False)])
async def test_batch_that_was_refused_as_a_whole_is_judged_as_a_whole(
    world: Any, missing_units: int, accepts: bool
) -> None:
    misdeclared = Ruling(Verdict.REJECTED, Reason.BATCH_MISDECLARED)
    ruling, _ = await world(ROWS, misdeclared, missing_units=missing_units).rule()
    assert ruling == (ACCEPTED if accepts else misdeclared)


async def test_summoned_work_is_judged_by_what_the_chain_has_of_it(world: Any) -> None:
    shown = world(ROWS, REJECTED)
    entry, batch = shown.entry, shown.batch
    batch.records, batch.signers = None, 0
    batch.work = LeasedWork(entry.submission, entry.signature, entry.ticket, entry.ticket_signature)
    silent = replace(shown.case.claims[0], ruling=0, node_signature=b"")
    shown.case = make_case(case_id=summons_of(1), recorded=0, claims=[silent])
    shown.answers = {p: data for p, data in shown.answers.items() if "/work/" not in p}
    assert (await shown.rule())[0] == ACCEPTED


# Several cases at a time


async def test_engine_takes_one_case_after_the_other_each_with_its_policy(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = world(ROWS, REJECTED)
    judge, run = shown.judge(), shown.view.runs[RUN]
    later = PolicyVersion(VERSION + 1)
    run.checkpoints[later] = run.checkpoints[VERSION]
    loads: list[PolicyVersion] = []
    await judge._policies.require(ROOT, VERSION, tmp_path)
    judge.engine = SimpleNamespace(
        policy_version=VERSION, load_policy=lambda _folder, version: loads.append(version)
    )

    async def fetch(_self: CaseJudge, _wanted: Any, _sources: Any) -> Path:
        return tmp_path

    async def use(version: PolicyVersion) -> None:
        async with judge._policy(run, version, None):  # type: ignore[arg-type]
            for _ in range(5):
                await asyncio.sleep(0)
                assert (judge._loaded or [None] * 2)[1] == version

    monkeypatch.setattr(CaseJudge, "_fetch", fetch)
    await asyncio.gather(*map(use, (VERSION, later, VERSION, later, VERSION)))
    assert set(loads) == {VERSION, later}


async def test_policy_that_comes_slowly_delays_no_other_case(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = world(ROWS, REJECTED)
    judge, run = shown.judge(), shown.view.runs[RUN]
    later = PolicyVersion(VERSION + 1)
    run.checkpoints[later] = run.checkpoints[VERSION]
    begun = asyncio.Event()

    async def hang(_self: CaseJudge, _wanted: Any, _sources: Any) -> Path:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def use() -> None:
        async with judge._policy(run, later, None):  # type: ignore[arg-type]
            raise AssertionError

    monkeypatch.setattr(CaseJudge, "_fetch", hang)
    hanging = asyncio.ensure_future(use())
    await begun.wait()
    assert (await judge.judge(shown.case))[0] == ACCEPTED
    hanging.cancel()
    await asyncio.wait([hanging])


class Unloadable(HashEngine):
    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        raise EngineError(f"version {version} in {folder.name} does not load")


class Failing(HashEngine):
    """Fails with every sample."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def recompute(self, samples: Any) -> Any:
        assert samples
        raise self.error


def serve_weights(monkeypatch: pytest.MonkeyPatch, folder: Path, number: float) -> None:
    """Have jurors fetch policies with a weight of this number."""
    folder.mkdir()
    save_file({"norm": torch.tensor([1.0, number])}, folder / "model.safetensors")

    async def fetch(_self: CaseJudge, _wanted: Any, _sources: Any) -> Path:
        return folder

    monkeypatch.setattr(CaseJudge, "_fetch", fetch)


ENGINES = {
    "works": HashEngine,
    "unloadable": Unloadable,
    "nonsense": lambda: Failing(EngineError("nonsense")),
    "disturbed": lambda: Failing(ValidatorDisturbed("no memory")),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [float("nan"), 1.0])
async def test_weights_decide_whether_a_policy_s_work_is_rejected_and_not_the_engine(
    world: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: str,
    number: float,
) -> None:
    """Else a weight that no sample uses convicts honest signers where a juror has trouble."""
    serve_weights(monkeypatch, tmp_path / "policy", number)
    shown = world(ROWS, REJECTED)
    judge = shown.judge()
    judge.engine, judge._loaded = ENGINES[engine](), None
    if number != 1.0:
        found, said = await judge.judge(shown.case)
        assert found == Ruling(Verdict.REJECTED, Reason.TOPLOC_MISMATCH)
        assert "its norm is not finite" in said["detail"]
        assert judge.engine.loaded == []
    elif engine == "works":
        assert (await judge.judge(shown.case))[0] == ACCEPTED
    else:
        for _ in range(2):
            with pytest.raises(EngineError):
                await judge.judge(shown.case)


@pytest.mark.parametrize("number", [float("nan"), 1.0])
async def test_earlier_work_counts_unless_its_policy_is_broken(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: float
) -> None:
    """Validators have no conduct of such work, because they reject it."""
    serve_weights(monkeypatch, tmp_path / "policy", number)
    shown = world(ROWS, DRIFT)
    earlier = replace(shown.batch.records[0], policy_version=VERSION + 1)
    run, judge = shown.view.runs[RUN], shown.judge()
    run.checkpoints[earlier.policy_version] = SimpleNamespace(
        **vars(run.checkpoints[VERSION]) | {"manifest_root": keccak(b"earlier")}
    )
    counted: list[int] = []

    def judge_again(_batches: Any, _place: Any, alone: Any, conducts: Any, _limits: Any) -> Any:
        counted.append(len(conducts))
        return alone, ""

    monkeypatch.setattr(judging, "judge_again", judge_again)
    monkeypatch.setattr(judging, "counted_before", lambda *_: [(OutcomePlace(1, 0), earlier)])
    assert (await judge.judge(shown.case))[0] == ACCEPTED
    assert counted == [1 if number != 1.0 else 2]


def another(case: CaseView, number: int) -> CaseView:
    """Return a case about the same work."""
    return replace(case, case_id=keccak(b"case %d" % number))


def hostile_copy(folder: Path, target: Path) -> Path:
    """Return a policy whose tokenizer takes cubic time for one long word."""
    shutil.copytree(folder, target)
    vocabulary = {"[UNK]": 0, "a": 1, "##a": 2, "b": 3}
    word = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=10**9)
    Tokenizer(word).save(str(target / "tokenizer.json"))
    return target


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_policy_that_hangs_is_stopped_and_other_cases_are_judged(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_given_up: bool
) -> None:
    good = build_judge(tmp_path / "good")
    folders = {VERSION: hostile_copy(good, tmp_path / "bad"), PolicyVersion(VERSION + 1): good}
    shown = world(ROWS, REJECTED)
    judge, run = shown.judge(), shown.view.runs[RUN]
    run.checkpoints |= dict.fromkeys(folders, run.checkpoints[VERSION])
    judge.engine = make_engine(JurorSettings(state_dir=tmp_path))
    judge._loaded, judge.turn_s = None, TURN_S if is_given_up else 0.0
    holds = asyncio.Event()

    async def fetch(_self: CaseJudge, wanted: Any, _sources: Any) -> Path:
        return folders[wanted[1]]

    async def use(version: PolicyVersion, text: str) -> tuple[int, ...]:
        async with judge._policy(run, version, None):  # type: ignore[arg-type]
            holds.set()
            return await judge._attended(asyncio.to_thread(judge.engine.encode, text))

    monkeypatch.setattr(CaseJudge, "_fetch", fetch)
    hanging = asyncio.create_task(use(VERSION, "a" * 30_000))
    await holds.wait()
    other = asyncio.create_task(use(PolicyVersion(VERSION + 1), "yes"))
    if is_given_up:
        await asyncio.sleep(0)
        hanging.cancel()
    assert await other
    with pytest.raises(asyncio.CancelledError if is_given_up else EngineError):
        await hanging
    judge.engine.close()


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_verifier_that_hangs_delays_no_vote_and_no_other_case(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_given_up: bool
) -> None:
    shown = world(ROWS, REJECTED)
    judge, loop = shown.judge(), asyncio.get_running_loop()
    hangs, ends, graded = asyncio.Event(), threading.Event(), []

    def grade(problem: Problem, completion: str) -> Grade:
        graded.append(threading.current_thread())
        if len(graded) == 1:
            loop.call_soon_threadsafe(hangs.set)
            ends.wait()
        return exact_match.grade_exact_match(problem, completion)

    async def fetch(*_: Any) -> Path:
        return tmp_path

    grader = replace(exact_match.VERIFIER, grade=grade)
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    monkeypatch.setattr(CaseJudge, "_fetch", fetch)
    monkeypatch.setattr(judging, "STOP_S", 0.0)
    judge.turn_s = TURN_S if is_given_up else 0.0
    hanging = asyncio.create_task(judge.judge(shown.case))
    await hangs.wait()
    other = asyncio.create_task(judge.judge(another(shown.case, 1)))
    if is_given_up:
        hanging.cancel()
    with pytest.raises(asyncio.CancelledError if is_given_up else EngineError):
        await hanging
    assert (await other)[0] == ACCEPTED
    ends.set()
    await asyncio.to_thread(graded[0].join)
    # The thread that hung graded no other answer.
    assert graded.count(graded[0]) == 1


@pytest.mark.parametrize("is_tried", [False, True], ids=["grades", "is tried"])
async def test_verifiers_that_hang_leave_threads_to_others(
    world: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    is_tried: bool,
) -> None:
    """One thread a case: it is not graded again while its verifier hangs, but afterwards."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    serve_weights(monkeypatch, tmp_path / "policy", 1.0)
    shown = world(ROWS, REJECTED)
    judge, case = shown.judge(), shown.case
    hangs, ends, hung = asyncio.Event(), threading.Event(), []
    request.addfinalizer(ends.set)

    def hang() -> None:
        if len(hung) < 4:
            hung.append(threading.current_thread())
            loop.call_soon_threadsafe(hangs.set)
            ends.wait()

    def grade(problem: Problem, completion: str) -> Grade:
        if not is_tried:
            hang()
        return exact_match.grade_exact_match(problem, completion)

    grader = replace(exact_match.VERIFIER, grade=grade)
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    if is_tried:
        monkeypatch.setattr(judging, "require_verifiers", lambda _rules: hang())
    monkeypatch.setattr(judging, "STOP_S", 0.0)
    monkeypatch.setattr(judging, "LOOK_S", 0.01)
    async with asyncio.timeout(60):
        for n in range(4):
            hanging = asyncio.create_task(judge.judge(another(case, n)))
            await hangs.wait()
            hangs.clear()
            hanging.cancel()
            await asyncio.wait([hanging])
        assert (await judge.judge(another(case, 4)))[0] == ACCEPTED
    with pytest.raises(EngineError, match="has not ended since the last try"):
        await judge.judge(another(case, 3))
    ends.set()
    for thread in hung:
        await asyncio.to_thread(thread.join)
    assert (await judge.judge(another(case, 3)))[0] == ACCEPTED


async def test_policy_that_is_still_loaded_after_a_stop_replaces_no_other(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = world(ROWS, REJECTED)
    judge, run, loop = shown.judge(), shown.view.runs[RUN], asyncio.get_running_loop()
    later = PolicyVersion(VERSION + 1)
    run.checkpoints[later] = run.checkpoints[VERSION]
    ends, loaded, holds = threading.Event(), list[PolicyVersion](), asyncio.Event()

    def load_policy(_folder: Path, version: PolicyVersion) -> None:
        if version == VERSION:
            loop.call_soon_threadsafe(holds.set)
            ends.wait()
        loaded.append(version)

    async def fetch(*_: Any) -> Path:
        return tmp_path

    async def use(version: PolicyVersion) -> None:
        async with judge._policy(run, version, None):  # type: ignore[arg-type]
            pass

    judge.engine = SimpleNamespace(policy_version=0, load_policy=load_policy)  # type: ignore[assignment]
    judge._loaded = None
    monkeypatch.setattr(CaseJudge, "_fetch", fetch)
    monkeypatch.setattr(judging, "STOP_S", 0.0)
    monkeypatch.setattr(judging, "LOOK_S", 0.01)
    hanging = asyncio.create_task(use(VERSION))
    await holds.wait()
    hanging.cancel()
    other = asyncio.create_task(use(later))
    await asyncio.wait([hanging, other], timeout=0.2)
    ends.set()
    await asyncio.wait([hanging, other])
    assert loaded == [VERSION, later]


@pytest.mark.skipif(sys.platform != "linux", reason="limits are read in /proc")
def test_process_that_reads_policies_of_strangers_has_a_memory_limit(tmp_path: Path) -> None:
    engine = make_engine(JurorSettings(state_dir=tmp_path))
    assert isinstance(engine, ProcessEngine)
    engine.load_policy(build_judge(tmp_path / "policy"), VERSION)
    limits = Path(f"/proc/{engine.pid}/limits").read_text()
    [limit] = [line.split()[3] for line in limits.splitlines() if line.startswith("Max data")]
    assert 0 < int(limit) < 2 * total_memory_bytes()
    engine.close()


# Who may sit


def bench_of(*places: BenchPlace, cases: tuple[Any, ...] = ()) -> Any:
    view = make_view()
    view.bench, view.cases = list(places), {keccak(b"%d" % i): c for i, c in enumerate(cases)}
    return view


def test_who_is_on_the_bench_or_may_be_drawn_yet_serves() -> None:
    require_place(bench_of(BenchPlace(ME, 10)), ME)
    require_place(bench_of(BenchPlace(ME, 10, 5001), cases=(make_case(),)), ME)
    # Its place was given up since.
    require_place(bench_of(cases=(make_case(jurors=(ME,)),)), ME)


@pytest.mark.parametrize(
    "view",
    [
        bench_of(),
        bench_of(BenchPlace(STRANGER, 10)),
        bench_of(BenchPlace(ME, 10, 20)),
        bench_of(BenchPlace(ME, 10, 20), cases=(make_case(),)),
    ],
    ids=["empty", "another's", "left", "left before the case"],
)
def test_who_cannot_be_drawn_is_told_so(view: Any) -> None:
    with pytest.raises(ConfigError, match="is not on the network's bench") as caught:
        require_place(view, ME)
    assert "muster juror join" in (caught.value.hint or "")
