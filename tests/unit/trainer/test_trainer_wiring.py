"""The connections of the flow: chain, orchestrator, engine and command line."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from trainer_fakes import KEY, Feed, make_recipe

from muster.chain import StreamItem
from muster.inference.transformers_engine import TransformersEngine
from muster.lifecycle import outage
from muster.lifecycle.outage import Outage
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError, ConfigError, ContractRevert, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.recipe import Recipe
from muster.protocol.seeds import ticket_seed
from muster.tasks import TaskSet, has_root
from muster.tasks.toys import make_sort
from muster.trainer.base_model import LESSONS, Lesson
from muster.trainer.cli import run_base_model
from muster.trainer.config import TrainerSettings
from muster.trainer.ports import ChainLedger, PolicyRoots
from muster.trainer.process import _announce, _Assembly, _load_recipe, _make_lists, _run_config

RUN = RunId(2)
V0, V1 = PolicyVersion(0), PolicyVersion(1)
ADDRESS = "0x" + "11" * 20


# ------------------------------------------------------------------------ chain


@dataclass
class FakeRuns:
    """RunRegistry with some versions."""

    roots: dict[int, Hash32] = field(default_factory=dict)
    revert: str = "RunVersionUnknown"
    published: list[tuple[int, int, Hash32]] = field(default_factory=list)
    trainer: str = address_of(KEY)

    async def checkpoint_of(self, _run: int, version: int) -> Any:
        if version not in self.roots:
            raise ContractRevert(self.revert)
        return SimpleNamespace(manifest_root=self.roots[version])

    async def latest_version(self, _run: int) -> int | None:
        return max(self.roots, default=None)

    async def publish_checkpoint(self, run_id: int, version: int, root: Hash32) -> None:
        self.published.append((run_id, version, root))

    async def config_of(self, run_id: int) -> Any:
        if run_id != RUN:
            raise ContractRevert("RunUnknown", (run_id,))
        return SimpleNamespace(trainer=self.trainer)


def _chain(runs: FakeRuns, labels: list[str] | None = None) -> Any:
    """A chain with these runs; `labels` are the labels of its writes."""

    def once(label: str) -> Any:
        if labels is not None:
            labels.append(label)
        return SimpleNamespace(runs=runs)

    return SimpleNamespace(runs=runs, chain_id=31337, once=once)


async def test_what_was_sent_before_is_waited_for() -> None:
    settled: list[bool] = []

    async def recover() -> None:
        settled.append(True)

    chain: Any = SimpleNamespace(sender=SimpleNamespace(recover=recover))
    await PolicyRoots(chain, RUN).settle()
    chain.sender = None
    await PolicyRoots(chain, RUN).settle()
    assert settled == [True]


async def test_policy_roots_are_read_and_published() -> None:
    runs, labels = FakeRuns({0: keccak(b"0")}), list[str]()
    policy_roots = PolicyRoots(_chain(runs, labels), RUN)
    assert await policy_roots.root_of(V0) == keccak(b"0")
    assert await policy_roots.root_of(V1) is None
    assert await policy_roots.newest() == 0
    await policy_roots.publish(V1, keccak(b"1"))
    assert runs.published == [(2, 1, keccak(b"1"))]
    assert labels == ["publish run 2 version 1 0x" + keccak(b"1").hex()]


async def test_policy_root_of_zero_is_none() -> None:
    assert await PolicyRoots(_chain(FakeRuns({0: Hash32(bytes(32))})), RUN).root_of(V0) is None


async def test_policy_roots_pass_other_reverts_on() -> None:
    with pytest.raises(ContractRevert, match="RunUnknown"):
        await PolicyRoots(_chain(FakeRuns(revert="RunUnknown")), RUN).root_of(V0)


async def test_recent_roots_are_those_rollouts_may_come_from() -> None:
    roots = {v: keccak(bytes([v])) for v in range(6) if v != 4}
    policy_roots = PolicyRoots(_chain(FakeRuns(roots)), RUN)
    assert await policy_roots.recent_roots(2) == {v: roots[v] for v in (3, 5)}
    assert await PolicyRoots(_chain(FakeRuns()), RUN).recent_roots(2) == {}


async def test_ledger_follows_the_view() -> None:
    feed, calls = Feed(), list[int]()

    def training_stream(run_id: RunId) -> Sequence[Any]:
        calls.append(run_id)
        return list(feed.ledger.items)

    view: Any = SimpleNamespace(runs={}, training_stream=training_stream)
    ledger = ChainLedger(view, RUN)
    assert list(ledger.stream()) == []
    waiting = asyncio.create_task(ledger.changed())
    await asyncio.sleep(0)
    view.runs[RUN] = object()
    feed.submit_many([1])
    await ledger.on_change([])
    await asyncio.wait_for(waiting, 1)
    assert list(ledger.stream()) == feed.ledger.items
    assert ledger.stream() is ledger.stream()
    assert calls == [RUN]


def test_ledger_derives_a_record_s_seed_from_the_chain() -> None:
    worker = SimpleNamespace(address=ADDRESS)
    member = SimpleNamespace(address=ADDRESS, beacon_under=lambda policy: keccak(policy.encode()))
    run = SimpleNamespace(checkpoints={PolicyVersion(3): "policy"}, members={ADDRESS: member})
    stranger = SimpleNamespace(address=address_of(KEY))
    view: Any = SimpleNamespace(runs={RUN: run}, worker_by_id={1: worker, 3: stranger})
    ledger, record = ChainLedger(view, RUN), Feed().ledger.accept(keccak(b"file"), version=3)
    expected = ticket_seed(RUN, keccak(b"policy"), ADDRESS, record.step, record.index)
    assert ledger.seed_of(record) == expected
    assert ledger.seed_of(replace(record, policy_version=PolicyVersion(4))) is None
    assert ledger.seed_of(replace(record, worker_id=2)) is None
    assert ledger.seed_of(replace(record, worker_id=3)) is None


@pytest.mark.parametrize(
    ("direct", "split_from", "expected"),
    [("work", None, True), (None, None, False), ("work", 4, False)],
    ids=["direct", "the orchestrator's", "taken out of the orchestrator's"],
)
def test_ledger_knows_what_the_orchestrator_never_committed(
    direct: str | None, split_from: int | None, expected: bool
) -> None:
    batch = SimpleNamespace(direct=direct, split_from=split_from)
    view: Any = SimpleNamespace(batches={5: batch})
    record = Feed().ledger.accept(keccak(b"file"))
    assert ChainLedger(view, RUN).is_direct(StreamItem(0, 5, 0, record)) is expected
    assert not ChainLedger(view, RUN).is_direct(StreamItem(0, 6, 0, record))


async def test_trainer_of_another_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="the key is of"):
        await _run_config(_chain(FakeRuns(trainer=ADDRESS)), RUN, KEY)


async def test_unknown_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no run 9 on chain 31337") as caught:
        await _run_config(_chain(FakeRuns()), RunId(9), KEY)
    assert "muster run create" in (caught.value.hint or "")


async def test_run_s_own_trainer_is_let_in() -> None:
    assert (await _run_config(_chain(FakeRuns()), RUN, KEY)).trainer == address_of(KEY)


# -------------------------------------------------------------------- documents


def _settings(folder: Path, **changes: Any) -> TrainerSettings:
    values = {"run": 1, "keystore": folder / "k", "orchestrator": "http://x", **changes}
    return TrainerSettings.model_validate(values)


async def test_recipe_comes_from_the_documents_folder(tmp_path: Path) -> None:
    recipe = make_recipe()
    (tmp_path / recipe.hash().hex()).write_bytes(recipe.to_bytes())
    settings = _settings(tmp_path, documents=tmp_path)
    assert await _load_recipe(settings, recipe.hash(), SimpleNamespace()) == recipe  # type: ignore[arg-type]


async def test_recipe_comes_from_the_orchestrator_without_a_folder(tmp_path: Path) -> None:
    recipe = make_recipe()

    async def document(pinned: Hash32) -> bytes:
        assert pinned == recipe.hash()
        return recipe.to_bytes()

    api: Any = SimpleNamespace(document=document)
    assert await _load_recipe(_settings(tmp_path), recipe.hash(), api) == recipe


class Orchestrator:
    """An orchestrator that is away for some requests, and then gives this recipe or this error."""

    def __init__(self, away: int, then: Recipe | ApiError, status: int = 503) -> None:
        self.away, self.then, self.status = away, then, status

    async def document(self, _: Hash32) -> bytes:
        self.away -= 1
        if self.away >= 0:
            raise ApiError("no answer now", status=self.status, code="unreachable")
        if isinstance(self.then, ApiError):
            raise self.then
        return self.then.to_bytes()

    async def download(self, pinned: Hash32, path: Path, **_: int) -> None:
        await self.document(pinned)
        make_sort(5, 0).write(path)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pauses of outages be short."""
    monkeypatch.setattr(outage, "Outage", lambda what: Outage(what, first_s=0.001))


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("status", [503, 429, 408])
async def test_recipe_is_waited_for_while_the_orchestrator_is_away(
    tmp_path: Path, status: int
) -> None:
    recipe = make_recipe()
    api: Any = Orchestrator(2, recipe, status)
    assert await _load_recipe(_settings(tmp_path), recipe.hash(), api) == recipe
    assert api.away == -1


@pytest.mark.usefixtures("_quick")
async def test_task_set_is_waited_for_while_the_orchestrator_is_away(tmp_path: Path) -> None:
    recipe = make_recipe()
    filters = recipe.filters.model_copy(update={"pool_window": 3, "pool_revisit": 8})
    recipe = recipe.model_copy(update={"filters": filters})
    pinned = make_sort(5, 0).hash()
    api: Any = Orchestrator(2, recipe)
    settings = _settings(tmp_path, state_dir=tmp_path / "state")
    await _make_lists(settings, recipe, pinned, api)
    assert has_root(tmp_path / "state" / pinned.hex(), pinned)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(("status", "code"), [(404, "document_unknown"), (502, "bad_answer")])
async def test_recipe_that_the_orchestrator_refuses_is_not_waited_for(
    tmp_path: Path, status: int, code: str
) -> None:
    refusal = ApiError("this is something else", status=status, code=code)
    api: Any = Orchestrator(1, refusal)
    with pytest.raises(ApiError, match="something else"):
        await _load_recipe(_settings(tmp_path), make_recipe().hash(), api)


@pytest.mark.parametrize(("data", "reason"), [(None, "is not in"), (b"{}", "is not the recipe")])
async def test_recipe_that_is_not_the_pinned_one_is_refused(
    tmp_path: Path, data: bytes | None, reason: str
) -> None:
    if data is not None:
        (tmp_path / make_recipe().hash().hex()).write_bytes(data)
    with pytest.raises(ConfigError, match=reason):
        await _load_recipe(
            _settings(tmp_path, documents=tmp_path),
            make_recipe().hash(),
            SimpleNamespace(),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("content", [None, b"", b"{}\n"])
def test_unusable_evaluation_set_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "held-out.jsonl"
    if content is not None:
        path.write_bytes(content)
    settings = _settings(tmp_path, eval_set=path)
    nothing: Any = None
    assembly = _Assembly(settings, RUN, make_recipe(), nothing, nothing, KEY)
    with pytest.raises((ConfigError, EncodingError)):
        assembly._evaluator()


def test_evaluations_compute_in_the_passes_number_format(tmp_path: Path) -> None:
    make_sort(2, 1).write(tmp_path / "held-out.jsonl")
    settings = _settings(tmp_path, eval_set=tmp_path / "held-out.jsonl", compute_dtype="bfloat16")
    nothing: Any = None
    evaluator = _Assembly(settings, RUN, make_recipe(), nothing, nothing, KEY)._evaluator()
    assert evaluator is not None
    engine = evaluator._engine
    assert isinstance(engine, TransformersEngine)
    assert engine.dtype == "bfloat16"


def test_ready_file_has_the_origin_s_url(tmp_path: Path) -> None:
    _announce("http://127.0.0.1:1", tmp_path / "ready")
    assert (tmp_path / "ready").read_text() == "http://127.0.0.1:1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


# ------------------------------------------------------------------ command line


def test_base_model_command_writes_disjoint_task_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[Path, int, Lesson]] = []
    monkeypatch.setattr(
        "muster.trainer.base_model.build_base_model",
        lambda folder, *, seed, lesson: built.append((folder, seed, lesson)),
    )
    words = ["--out", str(tmp_path / "m"), "--seed", "4", "--problems", "30"]
    words += [
        "--held-out",
        "10",
        "--task-set",
        str(tmp_path / "a"),
        "--eval-set",
        str(tmp_path / "b"),
    ]
    result = CliRunner().invoke(run_base_model, words)
    assert result.exit_code == 0, result.output
    assert result.output == f"{tmp_path / 'm'}\n"
    assert built == [(tmp_path / "m", 4, LESSONS["sort"])]
    first, second = (TaskSet.from_bytes((tmp_path / name).read_bytes()) for name in "ab")
    assert (len(first), len(second)) == (30, 10)
    assert not {p.prompt for p in first} & {p.prompt for p in second}
