"""`muster audit` of one run: a hostile neighbour, deadlines that nobody kept, paid garbage."""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain_recording import record, run_command
from chain_scenario import (
    ACCEPT,
    CHEATER,
    HONEST,
    NO_RUN,
    ORCHESTRATOR,
    OWNER,
    PARAMETERS,
    PRICE,
    REJECT,
    TOKEN,
    VALIDATORS,
    WINDOW_S,
    Scenario,
    accepted,
    fraud,
    network,
    play,
)

from muster.chain import PauseCause
from muster.chain.rpc import Rpc
from muster.client.audit.contradictions import Check, Contradiction, Kind, NotRerun
from muster.client.audit.history import HistorySource, read
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import observe
from muster.client.audit.report import build_report
from muster.client.quantities import format_time
from muster.protocol.encoding import keccak
from muster.protocol.ids import RunId, to_address
from muster.protocol.jury import BENCH
from muster.protocol.messages import Verdict

OVERDUE = "everything past its deadline is settled"
PAYMENTS = "payments are units × price, for accepted slots that are final"


@pytest_asyncio.fixture
async def net() -> AsyncIterator[Scenario]:
    async with network() as opened:
        yield opened


async def misbehave(net: Scenario) -> Scenario:
    """A second run on the same contracts, whose quorum signs contradictory outcomes."""
    other = dataclasses.replace(net, run_id=NO_RUN)
    await other.create_run()
    await other.join(CHEATER)
    await net.pass_time(1)
    twice = other.submission(CHEATER, 0)
    first, second = [await other.commit([twice]) for _ in range(2)]
    for batch_id in (first, second):
        await other.post(batch_id, [twice], [accepted(2, twice)])
    # Accepted work that was never committed, by a worker that never joined; a false reason.
    shown, judged = other.submission(CHEATER, 1), other.submission(HONEST, 2)
    await other.judge(shown, accepted(1, judged))
    odd = dataclasses.replace(accepted(2, shown), verdict=Verdict.FRAUD)
    await other.judge(shown, odd)
    # A case that nobody settles, and a batch that nobody judges.
    await other.claim(await other.proof(first, 0), twice, CHEATER, REJECT)
    await other.commit([other.submission(CHEATER, 9)])
    return other


async def test_a_hostile_run_on_the_same_contracts_is_no_fault_of_ours(
    net: Scenario, tmp_path: Path
) -> None:
    await play(net)
    other = await misbehave(net)
    await net.pass_time(PARAMETERS.outcome_deadline_s)
    ours = await run_command(net, tmp_path, "--run", "1")
    assert ours.exit_code == 0, ours.output
    assert "run 1 alone; 1 other runs were not checked: muster audit does" in ours.stdout
    assert "no contradiction" in ours.stdout
    found = json.loads((await run_command(net, tmp_path, "--run", "1", "--json")).stdout)
    assert all(check["passed"] for check in found["checks"])
    overdue = next(check for check in found["checks"] if check["name"] == OVERDUE)
    assert (overdue["detail"], overdue["notes"]) == ("all of it", [])
    for words in ((), ("--run", str(other.run_id))):
        theirs = await run_command(net, tmp_path, "--json", *words)
        kinds = {each["kind"] for each in json.loads(theirs.stdout)["contradictions"]}
        assert theirs.exit_code == 1
        assert {"slot-twice", "batch-root", "outcome-reason", "worker-unknown"} <= kinds


async def test_deposits_for_many_accounts_cost_an_audit_few_requests(
    net: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await play(net)
    other = await misbehave(net)
    owner = net.of(OWNER)
    await owner.allow("StakeVault", 10**6)
    for number in range(1, 25):
        for run_id in (BENCH, other.run_id):
            await owner.vault.deposit(RunId(run_id), to_address(f"0x{number:040x}"), 1)
    recording, view = await record(net), Ledger()
    for event in recording.events:
        view.apply(event)
    requests: list[int] = []
    ask = Rpc._ask

    async def counting(rpc: Rpc, calls: Any) -> Any:
        requests.append(len(calls))
        return await ask(rpc, calls)

    monkeypatch.setattr(Rpc, "_ask", counting)
    observed = await observe(recording.chain, view)
    assert len([key for key in observed.stakes if observed.stakes[key].active_wei == 1]) == 48
    assert len(requests) < 40
    history = await read(
        HistorySource((net.anvil.rpc_url,), net.deployment, run_id=RunId(net.run_id))
    )
    assert {run_id for run_id, _ in history.observed.stakes} == {BENCH, net.run_id}
    assert set(history.observed.funds) == {net.run_id}
    # It stands for no other run.
    assert history.report() == history.report(net.run_id)
    assert history.report().passed


async def test_what_the_contracts_hold_is_held_against_all_runs(net: Scenario) -> None:
    """A run's own sums can be right although the contracts could not pay everybody."""
    await play(net)
    await misbehave(net)
    recording, view = await record(net), Ledger()
    for event in recording.events:
        view.apply(event)
    observed = await observe(recording.chain, view)
    for name in ("vault_wei", "escrow_wei", "court_wei"):
        poor = dataclasses.replace(observed, **{name: getattr(observed, name) - 1})
        report = build_report(view, recording.chain.deployment, observed=poor, run_id=RunId(1))
        assert {each.kind for each in report.contradictions} == {Kind.CONTRACT_STATE}, name


# --------------------------------------------------------------------- deadlines


async def notes_of(net: Scenario) -> list[str]:
    report = await (await record(net)).report()
    assert report.passed, report.contradictions
    (check,) = (check for check in report.checks if check.name == OVERDUE)
    assert check.is_open is bool(check.notes)
    return list(check.notes)


async def test_an_overdue_batch_is_noted_with_who_may_do_what(net: Scenario) -> None:
    submission = net.submission(HONEST, 0)
    batch_id = await net.commit([submission])
    assert await notes_of(net) == []
    await net.pass_time(PARAMETERS.outcome_deadline_s)
    (note,) = await notes_of(net)
    assert f"batch {batch_id} of run 1 has no outcomes: until " in note
    assert "muster worker submit-direct" in note
    assert note.endswith("0.001 tokens wait with it")
    await net.pass_time(WINDOW_S)
    (note,) = await notes_of(net)
    act = f"muster dispute settle {batch_id}:0 --keystore FILE, ContributionLedger.voidBatch"
    assert f"anybody declares it void ({act}), since 20" in note
    header = (await net.view()).batches[batch_id].header()
    await net.of(OWNER).ledger.void_batch(header)
    assert await notes_of(net) == []


async def test_an_overdue_case_is_noted_until_somebody_closes_it(net: Scenario) -> None:
    submission = net.submission(HONEST, 0)
    batch_id = await net.judge(submission, accepted(1, submission))
    proof = await net.proof(batch_id, 0)
    await net.claim(proof, submission, HONEST, REJECT)
    assert await notes_of(net) == []
    await net.pass_time(PARAMETERS.vote_commit_s + PARAMETERS.vote_reveal_s)
    (note,) = await notes_of(net)
    act = f"muster dispute settle {batch_id}:0 --keystore FILE, DisputeCourt.settle"
    assert f"case 1 about {batch_id}:0 is open: anybody closes it ({act})" in note
    # Its bond, and the pay of the outcome.
    worth = (PARAMETERS.bond + submission.units * PRICE) / TOKEN
    assert note.endswith(f"{worth:g} tokens wait with it")
    await net.of(OWNER).court.settle(proof)
    assert await notes_of(net) == []


async def test_an_overdue_summons_is_the_case_that_waits_and_not_its_batch(net: Scenario) -> None:
    submission = net.submission(HONEST, 0)
    batch_id = await net.submit_direct(submission, HONEST)
    await net.pass_time(PARAMETERS.outcome_deadline_s)
    await net.summon(batch_id, submission, HONEST)
    assert await notes_of(net) == []
    await net.pass_time(PARAMETERS.vote_commit_s + PARAMETERS.vote_reveal_s)
    (note,) = await notes_of(net)
    assert "DisputeCourt.settleSummoned" in note


async def test_stake_that_nobody_takes_is_noted_with_when_it_can_leave(net: Scenario) -> None:
    submission = net.submission(CHEATER, 0)
    batch_id = await net.judge(submission, fraud(2, submission))
    (note,) = await notes_of(net)
    assert f"{batch_id}:0 is fraud, and nobody took the stake of {CHEATER.address}" in note
    assert "can withdraw it one unbonding period after it asks, and has not asked" in note
    act = f"muster dispute settle {batch_id}:0 --keystore FILE, ContributionLedger.executeFraud"
    assert f"anybody takes it ({act}), since 20" in note
    # A quarter of 100 tokens, for an exact fraud.
    assert note.endswith("25 tokens wait with it")
    await net.of(CHEATER).workers.exit(net.run_id)
    leaves_at = (await net.view()).stake(net.run_id, CHEATER.address).withdrawable_at
    (note,) = await notes_of(net)
    assert f"can withdraw 100 tokens from {format_time(leaves_at)}" in note
    await net.of(VALIDATORS[0]).runs.pause_slashing(
        net.run_id, PauseCause.CORRELATED_FAILURES, 0, keccak(b"evidence")
    )
    assert await notes_of(net) == []
    await net.pass_time(PARAMETERS.slash_pause_s)
    await net.pass_time(PARAMETERS.unbonding_s)
    await net.of(CHEATER).vault.withdraw(net.run_id)
    (note,) = await notes_of(net)
    assert "which has none left" in note
    assert note.endswith("0 tokens wait with it")


async def test_work_that_a_jury_acquits_or_nobody_calls_fraud_is_not_noted(net: Scenario) -> None:
    submission, honest = net.submission(CHEATER, 0), net.submission(HONEST, 0)
    await net.judge(honest, accepted(1, honest))
    batch_id = await net.judge(submission, fraud(2, submission))
    await net.dispute(await net.proof(batch_id, 0), submission, CHEATER, ACCEPT)
    assert await notes_of(net) == []


async def test_stake_that_nobody_releases_is_noted(net: Scenario) -> None:
    submission = net.submission(CHEATER, 0)
    batch_id = await net.judge(submission, fraud(2, submission))
    proof = await net.proof(batch_id, 0)
    await net.of(ORCHESTRATOR).ledger.execute_fraud(proof, net.held(proof, submission, CHEATER))
    assert await notes_of(net) == []
    await net.pass_time(WINDOW_S)
    (note,) = await notes_of(net)
    assert f"a fraud cost {CHEATER.address} is held in escrow" in note
    assert (
        f"(muster dispute settle {batch_id}:0 --keystore FILE, ContributionLedger.finaliseFraud)"
        in note
    )
    await net.of(OWNER).ledger.finalise_fraud(proof)
    assert await notes_of(net) == []


# ---------------------------------------------------------------------- garbage


def wrong(batch_id: int, position: int) -> Check:
    found = Contradiction(Kind.VERDICT_WRONG, "garbage", batch_id=batch_id, position=position)
    return Check("verdicts", False, "", (found,), 1)


def altered(batch_id: int, position: int) -> Check:
    found = Contradiction(Kind.EVIDENCE_ALTERED, "other", batch_id=batch_id, position=position)
    return Check("verdicts", False, "", (found,), 1)


def missing(batch_id: int, position: int) -> Check:
    return Check("verdicts", True, "", not_rerun=(NotRerun(batch_id, position, "gone", "keep"),))


async def paid(net: Scenario, about: Check | None) -> Check:
    """The check of payments, beside one of verdicts that were run again."""
    recording, view = await record(net), Ledger()
    for event in recording.events:
        view.apply(event)
    report = build_report(
        view,
        recording.chain.deployment,
        observed=await observe(recording.chain, view),
        run_id=RunId(1),
        about_source=[about] if about else [],
    )
    (check,) = (check for check in report.checks if check.name == PAYMENTS)
    return check


@pytest.mark.parametrize(
    ("about", "word"),
    [(lambda _batch, _at: None, "ok"), (wrong, "FAIL"), (altered, "open"), (missing, "open")],
)
async def test_a_payment_for_what_its_evidence_does_not_bear_out_is_never_ok(
    net: Scenario, about: Callable[[int, int], Any], word: str
) -> None:
    await play(net)
    check = await paid(net, about(1, 2))
    assert check.word == word
    named = {(f.kind, f.batch_id, f.position) for f in check.contradictions}
    assert named == ({(Kind.PAYMENT_UNEARNED, 1, 2)} if word == "FAIL" else set())
    assert [("1:2" in note, HONEST.address in note) for note in check.notes] == (
        [(True, True)] if word == "open" else []
    )
    # The fraud in that batch and the work that is not paid yet are no payments.
    for batch_id, position in ((1, 1), (2, 0)):
        assert (await paid(net, about(batch_id, position))).word == "ok"


async def test_of_garbage_that_may_not_have_been_paid_nothing_is_said_for_sure(
    net: Scenario,
) -> None:
    await play(net)
    await net.pass_time(WINDOW_S)
    # Two of three are paid; the last payment could have been for the third.
    last = net.submission(HONEST, 3)
    batch_id = await net.judge(last, accepted(1, last))
    await net.pass_time(WINDOW_S)
    batch = (await net.view()).batches[batch_id]
    await net.of(HONEST).escrow.claim([batch.claim([0])])
    check = await paid(net, wrong(2, 0))
    assert check.word == "open"
    assert "nobody can tell whether it earned 2:0" in check.notes[0]
    batch = (await net.view()).batches[2]
    await net.of(HONEST).escrow.claim([batch.claim([0])])
    assert (await paid(net, wrong(2, 0))).word == "FAIL"
