"""The demo's promises: kept by an honest story, broken by each dishonest twin of it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.app.demo.keys import cast
from muster.app.demo.report import DemoObservations, RecordedSubmission, TrainedStep, build_report
from muster.chain import Offence, StakeView
from muster.protocol.encoding import keccak
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict

RUN = RunId(1)
PRICE = 10
PEOPLE = cast(1, honest=1, cheats=("other-model",))
HONEST, RESTARTED, CHEATER = (member.wallet.address for member in PEOPLE.members)
(JUROR,) = (juror.address for juror in PEOPLE.jurors)
BENCH, OTHER_RUN = RunId(0), RunId(2)
ROOT = keccak(b"root")


def record(worker_id: int, index: int, verdict: Verdict = Verdict.ACCEPTED) -> OutcomeRecord:
    return OutcomeRecord(
        worker_id=worker_id,
        step=Step(1),
        index=index,
        policy_version=PolicyVersion(0),
        file_hash=keccak(bytes([worker_id, index])),
        rollouts=8,
        units=40,
        verdict=verdict,
        reason=Reason.NONE if verdict is Verdict.ACCEPTED else Reason.TOPLOC_MISMATCH,
    )


RECORDS = [record(1, 0), record(2, 0), record(1, 1), record(2, 1), record(3, 0, Verdict.FRAUD)]


class View(SimpleNamespace):
    """A chain view with the fields that the report reads."""

    def training_stream(self, _run: RunId) -> list[Any]:
        records = [r for batch in self.batches.values() for r in batch.records]
        accepted = [r for r in records if r.verdict is Verdict.ACCEPTED]
        return [SimpleNamespace(record=r) for r in accepted]


def make_batch(records: list[OutcomeRecord], root: Hash32 = ROOT, *, direct: bool = False) -> Any:
    return SimpleNamespace(
        run_id=RUN, root=root, block_number=9, records=list(records), direct=direct or None
    )


def make_view() -> Any:
    batch = make_batch(RECORDS)
    slash = SimpleNamespace(
        run_id=RUN,
        owner=CHEATER,
        offence=Offence.FRAUD,
        amount_wei=500,
        tx_hash="0x1",
        batch_id=1,
        position=4,
        priors=0,
        state="released",
    )
    members = {
        HONEST: SimpleNamespace(worker_id=1, status="Active", active_wei=1000),
        RESTARTED: SimpleNamespace(worker_id=2, status="Active", active_wei=1000),
        CHEATER: SimpleNamespace(worker_id=3, status="Banned", active_wei=500),
    }
    terms = SimpleNamespace(price_per_unit=PRICE, fraud_ppm=500_000, exact_fraud_ppm=500_000)
    return View(
        workers=members,
        stakes={
            (RUN, HONEST): StakeView(RUN, HONEST, active_wei=1000),
            (RUN, RESTARTED): StakeView(RUN, RESTARTED, active_wei=1000),
            (RUN, CHEATER): StakeView(RUN, CHEATER, active_wei=500, slashed_wei=500),
            (BENCH, JUROR): StakeView(BENCH, JUROR, active_wei=2000),
        },
        batches={1: batch},
        slashes=[slash],
        payments=[
            SimpleNamespace(worker=HONEST, amount_wei=800),
            SimpleNamespace(worker=RESTARTED, amount_wei=800),
        ],
        runs={
            RUN: SimpleNamespace(
                config=SimpleNamespace(terms=terms),
                terms=[terms],
                members=members,
                checkpoints={v: SimpleNamespace(block_number=v) for v in range(30)},
            )
        },
    )


def make_audit() -> dict[str, Any]:
    def worker(address: str, status: str, accepted: int, fraud: int) -> dict[str, Any]:
        units = accepted * 40
        return {
            "address": address,
            "status": status,
            "submitted": accepted + fraud,
            "accepted": accepted,
            "fraud": fraud,
            "units": units,
            "paid_wei": str(units * PRICE),
        }

    return {
        "workers": [
            worker(HONEST, "active", 2, 0),
            worker(RESTARTED, "active", 2, 0),
            worker(CHEATER, "banned", 0, 1),
        ],
        "slashes": [{"worker": CHEATER, "amount_wei": "500"}],
        "checks": [{"name": "roots", "passed": True}],
    }


def make_observed() -> DemoObservations:
    return DemoObservations(
        cast=PEOPLE,
        run_id=RUN,
        view=make_view(),
        steps=2,
        returned_at=7,
        wall_s=12.34,
        evaluations=[(0, 0.3), (2, 0.8)],
        trained=[TrainedStep(0, 2, 0.4), TrainedStep(2, 4, 0.7)],
        stored=[RecordedSubmission(r.file_hash, ROOT, i) for i, r in enumerate(RECORDS)],
        earned_wei={HONEST: 800, RESTARTED: 800, CHEATER: 0},
        audit=make_audit(),
        staked_wei={
            (RUN, HONEST): 1000,
            (RUN, RESTARTED): 1000,
            (RUN, CHEATER): 1000,
            (BENCH, JUROR): 2000,
        },
        rpc="http://127.0.0.1:8545",
        chain_id=31337,
        deployments="d/31337.json",
    )


def broken(observed: DemoObservations) -> list[str]:
    return [c["name"] for c in build_report(observed)["checks"] if not c["passed"]]


def test_an_honest_story_keeps_every_promise() -> None:
    report = build_report(make_observed())
    assert all(check["passed"] for check in report["checks"])
    assert len(report["checks"]) == 11


def test_the_readme_names_every_promise() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    promises = [check["name"] for check in build_report(make_observed())["checks"]]
    assert re.findall(r"^\d+\. (.+)$", readme, re.M) == promises


def test_the_report_has_the_documented_form() -> None:
    report = build_report(make_observed())
    assert set(report) == {"wall_s", "steps", "reward", "workers", "slashes", "chain", "checks"}
    assert report["reward"] == {"start": 0.3, "end": 0.8, "curve": [0.4, 0.7]}
    assert report["slashes"] == [
        {"worker": CHEATER, "amount_wei": "500", "reason": "toploc_mismatch", "tx": "0x1"}
    ]
    assert report["workers"][0] == {
        "address": HONEST,
        "role": "honest",
        "status": "active",
        "stake_wei": "1000",
        "submitted": 2,
        "accepted": 2,
        "rejected": 0,
        "fraud": 0,
        "units": 80,
        "paid_wei": "800",
    }


@pytest.mark.parametrize(
    ("evaluations", "reason"),
    [
        ([(0, 0.3), (2, 0.69)], "ends too low"),
        ([(0, 0.5), (2, 0.75)], "gains too little"),
        ([(0, 0.3)], "was never measured at the end"),
        ([], "was never measured"),
    ],
)
def test_learning_is_denied(evaluations: list[tuple[int, float]], reason: str) -> None:
    assert broken(replace(make_observed(), evaluations=evaluations)) == ["the policy learned"], (
        reason
    )


@pytest.mark.parametrize("returned_at", [9, 13])
def test_a_worker_that_did_nothing_after_its_return_is_noticed(returned_at: int) -> None:
    observed = replace(make_observed(), returned_at=returned_at)
    assert broken(observed) == ["the killed worker came back and worked"]


@pytest.mark.parametrize("returned_at", [None, 14])
def test_a_return_is_not_promised_when_there_was_no_time_for_it(returned_at: int | None) -> None:
    report = build_report(replace(make_observed(), returned_at=returned_at))
    assert "the killed worker came back and worked" not in [c["name"] for c in report["checks"]]


def test_a_missing_step_is_noticed() -> None:
    assert "every training step was made" in broken(replace(make_observed(), steps=3))


@pytest.mark.parametrize(
    "trained",
    [
        [TrainedStep(0, 2, 0.4), TrainedStep(1, 4, 0.7)],
        [TrainedStep(0, 2, 0.4), TrainedStep(3, 4, 0.7)],
        [TrainedStep(0, 2, 0.4), TrainedStep(2, 5, 0.7)],
        [TrainedStep(0, 2, 0.4), TrainedStep(2, 2, 0.7)],
    ],
    ids=["twice", "gap", "beyond the stream", "nothing"],
)
def test_files_trained_twice_or_lost_are_noticed(trained: list[TrainedStep]) -> None:
    observed = replace(make_observed(), trained=trained)
    assert broken(observed) == ["no accepted file was trained twice or lost"]


def _change_view(change: Callable[[Any], None]) -> DemoObservations:
    observed = make_observed()
    change(observed.view)
    return observed


def _set(target: str, name: str, value: object) -> Callable[[Any], None]:
    return lambda view: setattr(view.workers[target], name, value)


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        (_set(CHEATER, "status", "Active"), "every cheater was slashed and shut out"),
        (lambda view: view.slashes.clear(), "every cheater was slashed and shut out"),
        (_set(HONEST, "status", "Jailed"), "no honest worker was slashed"),
        (lambda view: setattr(view.slashes[0], "owner", HONEST), "no honest worker was slashed"),
        (
            lambda view: setattr(view.payments[0], "amount_wei", 799),
            "every honest worker was paid what the ledger says",
        ),
        (lambda view: view.payments.pop(), "every honest worker was paid what the ledger says"),
        (lambda view: view.batches[1].records.reverse(), "chain and database agree"),
    ],
)
def test_a_chain_that_says_otherwise_breaks_the_promise(
    change: Callable[[Any], None], promise: str
) -> None:
    assert promise in broken(_change_view(change))


def _lose(view: Any, key: tuple[RunId, str], wei: int) -> None:
    view.stakes[key].active_wei -= wei
    view.stakes[key].slashed_wei += wei


@pytest.mark.parametrize(
    "change",
    [
        lambda view: setattr(view.stakes[RUN, HONEST], "active_wei", 999),
        lambda view: _lose(view, (RUN, HONEST), 1),
        lambda view: _lose(view, (BENCH, JUROR), 10),
        lambda view: _lose(view, (RUN, CHEATER), 1),
        lambda view: setattr(view.slashes[0], "run_id", OTHER_RUN),
        lambda view: view.stakes.update(
            {(OTHER_RUN, HONEST): StakeView(OTHER_RUN, HONEST, slashed_wei=5)}
        ),
    ],
    ids=["vanished", "honest", "juror", "more than the terms", "another run", "never staked"],
)
def test_a_loss_that_nobody_signed_for_is_noticed(change: Callable[[Any], None]) -> None:
    assert broken(_change_view(change)) == ["nobody lost what it had not signed for"]


def test_a_second_fraud_may_cost_what_is_left() -> None:
    observed = make_observed()
    second = SimpleNamespace(**vars(observed.view.slashes[0]) | {"amount_wei": 500, "priors": 1})
    observed.view.slashes.append(second)
    _lose(observed.view, (RUN, CHEATER), 500)
    observed.audit["slashes"].append({"worker": CHEATER, "amount_wei": "500"})
    assert broken(observed) == []


def test_a_balance_that_differs_from_the_payment_is_noticed() -> None:
    observed = replace(make_observed(), earned_wei={HONEST: 801, RESTARTED: 800, CHEATER: 0})
    assert broken(observed) == ["every honest worker was paid what the ledger says"]


@pytest.mark.parametrize(
    "stored",
    [
        [],
        [RecordedSubmission(r.file_hash, ROOT, i) for i, r in enumerate(RECORDS[:-1])],
        [RecordedSubmission(Hash32(bytes(32)), ROOT, i) for i in range(len(RECORDS))],
        [RecordedSubmission(r.file_hash, ROOT, i + 1) for i, r in enumerate(RECORDS)],
    ],
    ids=["empty", "missing one", "other files", "other places"],
)
def test_a_database_that_differs_is_noticed(stored: list[RecordedSubmission]) -> None:
    assert broken(replace(make_observed(), stored=stored)) == ["chain and database agree"]


@pytest.mark.parametrize(
    ("direct", "stored", "expected"),
    [
        (True, [], []),
        (True, [RECORDS[-1].file_hash], []),
        (True, [Hash32(bytes(32))], ["chain and database agree"]),
        (False, [], ["chain and database agree"]),
    ],
    ids=["absent", "stored", "stored as another file", "absent and not direct"],
)
def test_database_need_not_hold_work_committed_directly(
    direct: bool, stored: list[Hash32], expected: list[str]
) -> None:
    observed, root = make_observed(), keccak(b"direct")
    observed.view.batches[1].records.pop()
    observed.view.batches[2] = make_batch(RECORDS[-1:], root, direct=direct)
    rows = [*observed.stored[:-1], *(RecordedSubmission(h, root, 0) for h in stored)]
    assert broken(replace(observed, stored=rows)) == expected


def test_a_waiting_submission_is_no_disagreement() -> None:
    observed = make_observed()
    waiting = RecordedSubmission(keccak(b"waiting"), None, None)
    assert broken(replace(observed, stored=[*observed.stored, waiting])) == []


def test_an_audit_with_a_contradiction_is_noticed() -> None:
    audit = make_audit() | {"checks": [{"name": "roots", "passed": False}]}
    assert broken(replace(make_observed(), audit=audit)) == ["the auditor finds no contradiction"]


def test_an_audit_without_checks_is_no_audit() -> None:
    audit = make_audit() | {"checks": []}
    assert broken(replace(make_observed(), audit=audit)) == ["the auditor finds no contradiction"]


@pytest.mark.parametrize("name", ["status", "submitted", "accepted", "fraud", "units", "paid_wei"])
def test_an_audit_with_another_figure_is_noticed(name: str) -> None:
    audit = make_audit()
    audit["workers"][0][name] = "other"
    assert broken(replace(make_observed(), audit=audit)) == [
        "the auditor's figures equal the report's"
    ]


def test_an_audit_with_another_slash_is_noticed() -> None:
    audit = make_audit() | {"slashes": []}
    assert broken(replace(make_observed(), audit=audit)) == [
        "the auditor's figures equal the report's"
    ]
