"""Traps: exactly one strike, recorded before it is signed, scored by the signers' outcomes."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from worlds.cases import ME, PEER, STRANGER, make_view_batch
from worlds.client_desk import Desk
from worlds.client_world import (
    CALIBRATION,
    RULES,
    VERSION,
    HashEngine,
    as_claimed,
    make_claim,
    make_rollouts,
    make_submission,
    make_ticket,
)

from muster.chain.structs import Offence
from muster.client.cli import trap
from muster.client.cli.printing import SENT, tell_sent
from muster.client.validator.judging import examine
from muster.client.worker.trapping import TrapJournal, TrapWorker, lay
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainUnreachable, ConfigError, WalletError
from muster.protocol.ids import RunId, Step
from muster.protocol.messages import Reason, Verdict
from muster.protocol.traps import KINDS, PLANS, Trap, TrapKind, TrapPlan
from muster.wallet import save_wallet

TICKET = make_ticket()
ROWS = make_rollouts(TICKET)
ENGINE: Any = HashEngine(VERSION)
PLAN = TrapPlan(RunId(7), TICKET.worker, Step(0), Step(10), 1_000_000, keccak(b"secret"))


# Laying


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", range(4))
def test_right_verdict_of_a_trap_is_rejected_by_one_strike(kind: TrapKind, row: int) -> None:
    made, rows = lay(Trap(kind, row), TICKET, ROWS, RULES, ENGINE)
    assert made is not None
    submission = make_submission(TICKET, rows)
    judgement = examine(make_claim(submission, TICKET), rows, RULES, HashEngine(VERSION))
    assert judgement.finding is not None
    assert judgement.finding.verdict is Verdict.REJECTED
    assert judgement.finding.reason in (Reason.SAMPLER_MISMATCH, Reason.TOPLOC_MISMATCH)
    assert sum(a != b for a, b in zip(rows, ROWS, strict=True)) == 1


def test_other_seed_gives_itself_away_only_to_who_replays() -> None:
    kind, rows = lay(Trap(TrapKind.OTHER_SEED, 1), TICKET, ROWS, RULES, ENGINE)
    assert kind is TrapKind.OTHER_SEED
    changed, honest = rows[1], ROWS[1]
    same = replace(
        changed,
        completion_tokens=honest.completion_tokens,
        proofs=honest.proofs,
        task_reward=honest.task_reward,
    )
    assert same == honest


def test_where_nothing_fails_the_file_stays_honest() -> None:
    sampler = CALIBRATION.sampler.model_copy(update={"margin": 1e9})
    lenient = CALIBRATION.model_copy(update={"sampler": sampler})
    rules = replace(RULES, calibration=lenient)
    alike = [replace(row, proofs=ROWS[0].proofs) for row in ROWS]
    kind, rows = lay(Trap(TrapKind.COLD, 0), TICKET, alike, rules, ENGINE)
    assert (kind, rows) == (None, alike)


def test_journal_remembers_what_a_slot_became(tmp_path: Path) -> None:
    with TrapJournal(tmp_path) as journal:
        journal.record((4, 0), keccak(b"file"), TrapKind.COLD)
        journal.record((4, 1), keccak(b"other"), None)
    with TrapJournal(tmp_path) as journal:
        assert [journal.laid[4, n]["kind"] for n in (0, 1)] == ["cold", None]


@pytest.mark.parametrize("change", [{"worker": STRANGER}, {"run_id": RunId(8)}])
def test_plan_for_somebody_else_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    plan, desk = replace(PLAN, **change), Desk(tmp_path)
    with TrapJournal(tmp_path) as journal:
        assert TrapWorker(desk.loop.context, PLAN, journal).plan is PLAN
        other = f"for worker {plan.worker} of run {plan.run_id}"
        with pytest.raises(ConfigError, match=other) as refused:
            TrapWorker(desk.loop.context, plan, journal)
    assert refused.value.hint == "check --plan, --worker and --run"
    desk.close()


# Reporting


def world(
    verdict: Verdict, cases: dict[bytes, Any] | None = None, **changes: Any
) -> tuple[Any, Any]:
    """A chain with one file of the trap worker, signed by two of three validators."""
    record = replace(as_claimed(make_submission(TICKET, ROWS), 5), verdict=verdict, **changes)
    batch = make_view_batch([record.leaf(1, 0)], [record])
    batch.signers = 0b011
    view = SimpleNamespace(
        workers={PLAN.worker: SimpleNamespace(worker_id=5)},
        batches={1: batch},
        runs={7: SimpleNamespace(seats={ME: 1, PEER: 2, STRANGER: 4})},
        cases={record.leaf(1, 0): cases} if cases else {},
        slashes=[],
    )
    return view, record


def case(**values: bool) -> Any:
    return SimpleNamespace(**({"closed": False, "overturned": False} | values))


@pytest.mark.parametrize(
    ("verdict", "about", "fate"),
    [
        (Verdict.REJECTED, None, trap.TrapFate.CAUGHT),
        (Verdict.FRAUD, None, trap.TrapFate.CAUGHT),
        (Verdict.ACCEPTED, None, trap.TrapFate.MISSED),
        (Verdict.ACCEPTED, case(), trap.TrapFate.CHALLENGED),
        (Verdict.ACCEPTED, case(closed=True, overturned=True), trap.TrapFate.OVERTURNED),
        (Verdict.ACCEPTED, case(closed=True), trap.TrapFate.MISSED),
    ],
)
def test_fate_follows_from_verdict_and_case(
    verdict: Verdict, about: Any, fate: trap.TrapFate
) -> None:
    view, _ = world(verdict, about)
    [found] = trap.find_traps(view, PLAN)
    assert (found.fate, found.signers) == (fate, tuple(sorted((ME, PEER))))
    right = fate is trap.TrapFate.CAUGHT
    assert trap.score([found]) == {
        who: {"caught": int(right), "missed": int(not right)} for who in (ME, PEER)
    }
    assert bool(trap.to_challenge([found])) is (fate is trap.TrapFate.MISSED)


def test_who_lost_stake_for_a_trap_is_named() -> None:
    view, _ = world(Verdict.ACCEPTED, case(closed=True, overturned=True))
    wrong = {"run_id": 7, "offence": Offence.WRONG_VERDICT, "tag": 1, "owner": PEER}
    others = [
        {"offence": Offence.ABSENT_JUROR, "owner": ME},
        {"tag": 2, "owner": ME},
        {"run_id": 8, "owner": ME},
        {"owner": STRANGER},
    ]
    view.slashes = [
        SimpleNamespace(**wrong, amount_wei=5),
        *(SimpleNamespace(**wrong | other, amount_wei=7) for other in others),
    ]
    [found] = trap.find_traps(view, PLAN)
    assert found.slashed == {PEER: 5}


def test_file_that_stayed_honest_counts_for_nobody() -> None:
    view, record = world(Verdict.ACCEPTED)
    [found] = trap.find_traps(view, PLAN, {(record.step, record.index): {"kind": None}})
    assert found.fate is trap.TrapFate.HONEST
    assert trap.score([found]) == {}


@pytest.mark.parametrize(
    "plan",
    [replace(PLAN, rate_ppm=0), replace(PLAN, run_id=RunId(8)), replace(PLAN, last_step=Step(3))],
)
def test_files_outside_the_plan_are_no_traps(plan: TrapPlan) -> None:
    assert trap.find_traps(world(Verdict.ACCEPTED)[0], plan) == []


def test_files_of_other_workers_are_no_traps() -> None:
    assert trap.find_traps(world(Verdict.ACCEPTED, worker_id=6)[0], PLAN) == []


# What came first


def test_plan_must_be_older_than_every_file() -> None:
    view, _ = world(Verdict.ACCEPTED)
    found = trap.find_traps(view, PLAN)
    assert trap.require_before(trap.PlanOnChain(50, "0x", ME), view, found)
    with pytest.raises(ConfigError, match="was committed before the plan, in block 51"):
        trap.require_before(trap.PlanOnChain(51, "0x", ME), view, found)
    with pytest.raises(ConfigError, match="not on chain"):
        trap.require_before(None, view, found)


class Logs:
    """A chain that has these approvals."""

    def __init__(self, *values: int) -> None:
        self.deployment = SimpleNamespace(contracts={"MusterToken": STRANGER}, deploy_block=1)
        self.rpc = self
        self.values = values

    async def block_number(self) -> int:
        return 9

    async def call(self, method: str, query: dict[str, Any]) -> list[dict[str, Any]]:
        assert method == "eth_getLogs"
        assert (query["fromBlock"], query["toBlock"]) == (hex(1), hex(9))
        assert query["topics"][2].endswith(PLANS[2:].lower())
        topics = [query["topics"][0], "0x" + "00" * 12 + ME[2:].lower(), query["topics"][2]]
        return [
            {"data": hex(v), "blockNumber": hex(9), "transactionHash": "0xab", "topics": topics}
            for v in self.values
        ]


async def test_anchor_is_the_approval_that_names_the_commitment() -> None:
    mine = int.from_bytes(PLAN.commitment(), "big")
    found = await trap.find_anchor(Logs(1, mine), PLAN)  # type: ignore[arg-type]
    assert found is not None
    assert (found.block_number, found.by) == (9, ME)
    assert await trap.find_anchor(Logs(1, mine + 1), PLAN) is None  # type: ignore[arg-type]


# The command


@pytest.mark.parametrize("plan", [None, "{", '{"run_id": 1}'])
def test_a_trap_worker_without_a_plan_is_refused(tmp_path: Path, plan: str | None) -> None:
    path = tmp_path / "plan.json"
    if plan is not None:
        path.write_text(plan)
    words = ("run", "--plan", str(path), "--run", "1", "--keystore", "none")
    error = CliRunner().invoke(trap.trap, words).exception
    assert isinstance(error, ConfigError)
    assert "cannot read the plan" in str(error)
    assert error.hint == "muster validator trap plan writes one"


def test_a_trap_worker_needs_a_keystore_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json()))
    words = ("run", "--plan", str(path), "--run", "7", "--keystore", str(tmp_path / "none"))
    given = ("--worker", PLAN.worker, "--orchestrator", "http://x:1", "--state-dir", str(tmp_path))
    error = CliRunner().invoke(trap.trap, (*words, *given)).exception
    assert isinstance(error, WalletError)
    assert CliRunner().invoke(trap.trap, ("run", "--run", "1")).exit_code == 2


@pytest.fixture
def planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """The words of a command that plans, with a chain that can be reached."""

    async def connect(*_: object, **__: object) -> Any:
        return nullcontext()

    monkeypatch.setattr(trap.Chain, "connect", connect)
    monkeypatch.setenv("MUSTER_PASSWORD", "s")
    key = tmp_path / "owner.json"
    save_wallet(key, bytes(31) + b"\x07", "s", light=True)
    words = ("plan", "--run", "7", "--worker", PLAN.worker, "--last-step", "9", "--rpc", "x")
    SENT.clear()
    yield (*words, "--keystore", str(key), "--out", str(tmp_path / "plan.json"))
    SENT.clear()


def test_a_plan_goes_to_a_free_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planning: tuple[str, ...]
) -> None:
    sent: list[TrapPlan] = []
    out = tmp_path / "plan.json"

    async def anchor(_: object, plan: TrapPlan) -> str:
        assert trap.read_plan(out) == plan
        sent.append(plan)
        return "0xab"

    monkeypatch.setattr(trap, "anchor_plan", anchor)
    first = CliRunner().invoke(trap.trap, planning)
    assert first.exception is None, first.output
    assert trap.read_plan(out) == sent[0]
    again = CliRunner().invoke(trap.trap, planning)
    assert isinstance(again.exception, ConfigError)
    assert "plan.json exists already" in str(again.exception)
    assert "--out" in (again.exception.hint or "")
    assert trap.read_plan(out) == sent[0]
    assert len(sent) == 1


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_plan_without_a_commitment_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planning: tuple[str, ...], is_sent: bool
) -> None:
    async def anchor(*_: object) -> str:
        if is_sent:
            tell_sent("0xab")
        raise ChainUnreachable("no answer")

    monkeypatch.setattr(trap, "anchor_plan", anchor)
    assert isinstance(CliRunner().invoke(trap.trap, planning).exception, ChainUnreachable)
    assert (tmp_path / "plan.json").exists() is is_sent
