"""`muster audit` of a real chain, and of twins of it that somebody tampered with."""

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain_recording import Recording, record, run_command
from chain_scenario import (
    ACCEPT,
    CHALLENGER,
    CHEATER,
    CONVICT,
    HONEST,
    JURORS,
    ORCHESTRATOR,
    OWNER,
    PARAMETERS,
    PRICE,
    REJECT,
    SALT,
    TOKEN,
    VALIDATORS,
    WINDOW_S,
    Scenario,
    accepted,
    fraud,
    network,
    play,
    rejected,
)

from muster.chain import ZERO_ADDRESS, Offence, OutcomeProof, save_deployment
from muster.client.audit.contradictions import Kind
from muster.client.audit.disputes import juries
from muster.client.audit.history import HistorySource, read
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import observe
from muster.client.audit.report import AuditReport
from muster.protocol.eip712 import sign
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId
from muster.protocol.jury import Ruling, claim_announcement, summons_of
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict

CHEATED = Ruling(Verdict.FRAUD, Reason.WRONG_SEED).number
ROOTS = "batch roots commit to the submissions that were judged"
SLASHES = "nobody lost what it had not signed for"


@pytest_asyncio.fixture
async def net() -> AsyncIterator[Scenario]:
    async with network() as opened:
        yield opened


def kinds(report: AuditReport) -> set[Kind]:
    assert report.passed == (not report.contradictions)
    return {found.kind for found in report.contradictions}


async def test_audit_figures_are_those_of_the_chain(net: Scenario) -> None:
    await play(net)
    report = await (await record(net)).report()
    workers = {w.address: w for w in report.workers}
    honest, cheater = workers[HONEST.address], workers[CHEATER.address]
    assert (honest.submitted, honest.accepted, honest.units) == (3, 3, 2300)
    assert (cheater.status, cheater.fraud, cheater.accepted) == ("banned", 1, 0)
    assert honest.paid_wei == str(1300 * 10**12)
    (run,) = report.runs
    assert (run.batches, run.judged, run.submitted, run.fraud) == (2, 2, 4, 1)
    (slash,) = report.slashes
    assert (slash.reason, slash.state, slash.batch_id) == ("wrong_seed", "released", 1)
    assert slash.amount_wei == str(25 * 10**18)


# --------------------------------------------------------------- tampered twins

Tampering = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], Kind]


def set_to(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: {**args, **changes}


def less(name: str, wei: int = 1) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: {**args, name: args[name] - wei}


def with_terms(**changes: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(args: dict[str, Any]) -> dict[str, Any]:
        terms = dataclasses.replace(args["config"].terms, **changes)
        return {**args, "config": dataclasses.replace(args["config"], terms=terms)}

    return change


def with_verdict(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: {**args, "verdict": dataclasses.replace(args["verdict"], **changes)}


def with_work(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: {**args, "work": dataclasses.replace(args["work"], **changes)}


def with_submission(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: with_work(
        submission=dataclasses.replace(args["work"].submission, **changes)
    )(args)


def flipped_verdict(args: dict[str, Any]) -> dict[str, Any]:
    records = bytearray(args["records"])
    records[54] = 3
    return {**args, "records": bytes(records)}


def more_units(args: dict[str, Any]) -> dict[str, Any]:
    records = bytearray(args["records"])
    records[53] ^= 1
    return {**args, "records": bytes(records)}


def one_signature(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, "signatures": args["signatures"][:65]}


def doubled_signature(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, "signatures": args["signatures"][:65] * 2}


def strangers_signature(args: dict[str, Any]) -> dict[str, Any]:
    stranger = sign(bytes(32), bytes([9]) * 32)  # type: ignore[arg-type]
    return {**args, "signatures": args["signatures"][:65] + stranger}


def high_s_signature(args: dict[str, Any]) -> dict[str, Any]:
    signatures = bytearray(args["signatures"])
    signatures[32] |= 0x80
    return {**args, "signatures": bytes(signatures)}


async def reject_twins(recording: Recording, tamperings: list[Tampering]) -> None:
    """Check that each tampering with a recording that passes is contradicted as it should be, by
    an audit of everything and by one of the run alone.
    """
    assert [kinds(report) for report in await recording.reports()] == [set(), set()]
    for name, change, expected in tamperings:
        at = next(i for i, event in enumerate(recording.events) if event.name == name)
        twin = list(recording.events)
        twin[at] = dataclasses.replace(twin[at], args=change(twin[at].args))
        for report in await recording.reports(twin):
            assert expected in kinds(report), (name, expected, kinds(report))


PLAYED: list[Tampering] = [
    ("OutcomesPosted", flipped_verdict, Kind.OUTCOMES_ROOT),
    ("OutcomesPosted", more_units, Kind.OUTCOME_QUORUM),
    ("OutcomesPosted", one_signature, Kind.OUTCOME_QUORUM),
    ("OutcomesPosted", doubled_signature, Kind.OUTCOME_QUORUM),
    ("OutcomesPosted", strangers_signature, Kind.OUTCOME_STRANGER),
    ("OutcomesPosted", high_s_signature, Kind.OUTCOME_SIGNATURE),
    ("OutcomesPosted", set_to(signers=0), Kind.OUTCOME_SIGNATURE),
    ("OutcomesPosted", set_to(signers=0, signatures=b""), Kind.OUTCOME_QUORUM),
    ("OutcomesPosted", set_to(outcomes_root=bytes(32)), Kind.OUTCOMES_ROOT),
    ("BatchCommitted", set_to(root=bytes(32)), Kind.OUTCOME_QUORUM),
    ("BatchCommitted", set_to(count=7), Kind.EVENT_ORDER),
    ("BatchCommitted", set_to(batch_id=9), Kind.EVENT_ORDER),
    ("BatchCommitted", set_to(terms=2), Kind.BATCH_TERMS),
    ("BatchCommitted", set_to(price_per_unit=1), Kind.BATCH_TERMS),
    ("BatchCommitted", set_to(price_per_unit=1), Kind.PAYMENT_UNDUE),
    ("RewardClaimed", set_to(units=10**6), Kind.PAYMENT_PRICE),
    ("RewardClaimed", set_to(amount=1), Kind.PAYMENT_PRICE),
    ("RewardClaimed", set_to(slots=4), Kind.PAYMENT_UNDUE),
    ("RewardClaimed", set_to(worker=CHEATER.address), Kind.PAYMENT_UNDUE),
    ("Slashed", set_to(from_active=10**18), Kind.SLASH_SHARE),
    ("Slashed", set_to(owner=HONEST.address), Kind.SLASH_UNFOUNDED),
    ("Slashed", set_to(run_id=2), Kind.SLASH_OTHER_RUN),
    ("Slashed", set_to(run_id=0), Kind.SLASH_OTHER_RUN),
    ("Slashed", set_to(escrow_id=bytes(32)), Kind.SLASH_UNFOUNDED),
    ("Slashed", with_verdict(tag=99), Kind.SLASH_UNFOUNDED),
    ("Slashed", with_verdict(position=0), Kind.SLASH_VERDICT),
    ("Slashed", with_verdict(position=99), Kind.SLASH_UNFOUNDED),
    ("Slashed", with_verdict(batch_id=77), Kind.SLASH_UNFOUNDED),
    ("Slashed", with_verdict(offence=Offence.FRAUD), Kind.SLASH_VERDICT),
    ("Slashed", with_verdict(offence=Offence.DOUBLE_SUBMISSION), Kind.SLASH_UNFOUNDED),
    ("Slashed", with_verdict(offence=Offence.DOUBLE_OUTCOME), Kind.SLASH_OTHER_RUN),
    ("Slashed", with_verdict(offence=Offence.ABSENT_JUROR), Kind.SLASH_OTHER_RUN),
    ("Slashed", with_verdict(offence=Offence.WRONG_VERDICT), Kind.SLASH_OTHER_RUN),
    ("WorkerBanned", set_to(worker=HONEST.address), Kind.SLASH_VERDICT),
    ("WorkerBanned", set_to(worker=HONEST.address), Kind.WORKER_INACTIVE),
    ("SlashReleased", set_to(burned=0, insured=0, rewarded=25 * 10**18), Kind.SLASH_SPLIT),
    ("SlashReleased", set_to(rewarded=10**18), Kind.SLASH_SPLIT),
    ("SlashReleased", set_to(reporter=HONEST.address), Kind.SLASH_REPORTER),
    ("Deposited", less("amount"), Kind.ROLE_STAKE),
    ("JurorJoined", set_to(place=9), Kind.EVENT_ORDER),
    ("RunFunded", set_to(amount=10**30), Kind.CONTRACT_STATE),
    ("RunFunded", set_to(amount=1), Kind.RUN_OVERDRAWN),
    ("WorkerRegistered", set_to(worker_id=5), Kind.EVENT_ORDER),
    ("WorkerJoined", set_to(terms=2), Kind.ROLE_STAKE),
    ("WorkerJoined", set_to(run_id=2), Kind.WORKER_UNKNOWN),
    ("CheckpointPublished", set_to(version=8), Kind.POLICY_UNPUBLISHED),
    ("RunCreated", with_terms(quorum=3), Kind.OUTCOME_QUORUM),
    ("RunCreated", with_terms(exact_fraud_ppm=10**6), Kind.SLASH_SHARE),
    ("ValidatorSeated", set_to(validator=CHEATER.address), Kind.OUTCOME_STRANGER),
    ("DirectlySubmitted", with_work(node_signature=bytes(65)), Kind.DIRECT_SIGNATURE),
    ("DirectlySubmitted", with_work(ticket_signature=bytes(65)), Kind.DIRECT_SIGNATURE),
    ("BondTaken", less("amount"), Kind.CASE_MONEY),
]


async def test_audit_rejects_a_chain_with_any_event_left_out(net: Scenario) -> None:
    await play(net)
    recording = await record(net)
    for at, event in enumerate(recording.events):
        report = await recording.report(recording.events[:at] + recording.events[at + 1 :])
        # The release of the stake says the same.
        assert report.passed == (event.name == "FraudFinalised"), event.name


async def test_audit_counts_roots_that_cannot_be_proven(net: Scenario) -> None:
    claimed, judged = net.submission(CHEATER, 0), net.submission(CHEATER, 0, units=999)
    await net.judge(claimed, fraud(2, judged))
    await net.commit([net.submission(HONEST, 0)])
    report = await (await record(net)).report()
    (roots,) = (check for check in report.checks if check.name == ROOTS)
    assert roots.passed
    assert roots.detail.startswith("0 proven, 2 cannot be")


async def test_audit_finds_accepted_work_that_was_never_committed(net: Scenario) -> None:
    claimed, judged = net.submission(HONEST, 0, units=99), net.submission(HONEST, 0, units=10)
    batch_id = await net.commit([claimed])
    # Colluding validators accept units that the worker never claimed.
    await net.post(batch_id, [claimed], [accepted(1, judged)])
    assert kinds(await (await record(net)).report()) == {Kind.BATCH_ROOT}


async def test_audit_names_fraud_that_nobody_executed(net: Scenario) -> None:
    submission = net.submission(CHEATER, 0)
    await net.judge(submission, fraud(2, submission))
    report = await (await record(net)).report()
    (slashes,) = (check for check in report.checks if check.name == SLASHES)
    assert slashes.passed
    assert "1 fraud verdicts not executed" in slashes.detail


async def test_audit_accepts_a_slash_of_unbonding_stake(net: Scenario) -> None:
    await net.of(CHEATER).vault.request_unbond(net.run_id, 33 * TOKEN + 1)
    await convict(net, net.submission(CHEATER, 0))
    report = await (await record(net)).report()
    # It fell below what is required, so that it was in jail when the work was committed.
    assert kinds(report) == set()
    assert report.slashes[0].state == "escrowed"


async def convict(net: Scenario, submission: Submission, reason: Any = fraud) -> OutcomeProof:
    """Have validators call a submission fraud, and execute it; return the outcome."""
    batch_id = await net.judge(submission, reason(2, submission))
    proof = await net.proof(batch_id, 0)
    await net.of(ORCHESTRATOR).ledger.execute_fraud(proof, net.held(proof, submission, CHEATER))
    return proof


# --------------------------------------------------------------------- disputes


async def disputed(net: Scenario) -> Recording:
    """A rejection that a jury turned into fraud: slashed with a reporter, final, signers fined."""
    submission = net.submission(CHEATER, 0)
    batch_id = await net.judge(submission, rejected(2, submission))
    proof, chain = await net.proof(batch_id, 0), net.of(ORCHESTRATOR)
    case_id = await net.dispute(proof, submission, CHEATER, CONVICT)
    await chain.ledger.execute_fraud(proof, net.held(proof, submission, CHEATER))
    for signer in VALIDATORS[:2]:
        await chain.court.fine_signer(proof, signer.address)
    for juror in (await net.view()).cases[case_id].jurors[:2]:
        await chain.court.collect_fee(case_id, juror)
    await net.pass_time(WINDOW_S)
    await chain.ledger.finalise_fraud(proof)
    return await record(net)


async def test_audit_follows_a_fraud_that_a_claimant_found() -> None:
    async with network() as net:
        report = await (await disputed(net)).report()
        assert kinds(report) == set()
        slashes = {slash.worker: slash for slash in report.slashes}
        assert (slashes[CHEATER.address].amount_wei, slashes[CHEATER.address].state) == (
            str(10 * TOKEN),
            "released",
        )
        assert slashes[VALIDATORS[0].address].offence == "wrong_verdict"
        assert {w.address: w.fraud for w in report.workers}[CHEATER.address] == 1


DISPUTED: list[Tampering] = [
    ("JuryDrawn", set_to(jurors=(VALIDATORS[0].address,)), Kind.CASE_JUROR),
    ("JuryDrawn", lambda args: {**args, "jurors": args["jurors"][::-1]}, Kind.CASE_JUROR),
    ("JurorJoined", set_to(juror=HONEST.address), Kind.ROLE_STAKE),
    ("VoteCommitted", set_to(juror=VALIDATORS[0].address), Kind.EVENT_ORDER),
    ("VoteRevealed", set_to(juror=VALIDATORS[0].address), Kind.EVENT_ORDER),
    ("VoteRevealed", set_to(case_id=bytes(32)), Kind.EVENT_ORDER),
    ("CaseOpened", set_to(position=5), Kind.CASE_UNFOUNDED),
    ("CaseOpened", set_to(batch_id=8), Kind.CASE_UNFOUNDED),
    ("CaseOpened", set_to(run_id=8), Kind.CASE_UNFOUNDED),
    ("CaseOpened", set_to(case_id=bytes(32)), Kind.EVENT_ORDER),
    ("CaseOpened", set_to(recorded=ACCEPT.number), Kind.CASE_UNFOUNDED),
    ("CaseOpened", set_to(worker=HONEST.address), Kind.CASE_UNFOUNDED),
    ("CaseOpened", set_to(places=3), Kind.EVENT_ORDER),
    ("Claimed", set_to(ruling=REJECT.number), Kind.CASE_UNFOUNDED),
    ("Claimed", with_work(node_signature=bytes(65)), Kind.CASE_UNFOUNDED),
    ("Claimed", with_submission(step=9), Kind.CASE_UNFOUNDED),
    ("ClaimSettled", set_to(returned=0), Kind.CASE_MONEY),
    ("CaseClosed", set_to(ruling=REJECT.number), Kind.CASE_VERDICT),
    ("CaseClosed", set_to(status=2), Kind.CASE_VERDICT),
    ("CaseClosed", set_to(fee=0), Kind.CASE_MONEY),
    ("CaseClosed", set_to(reporter=HONEST.address), Kind.CASE_MONEY),
    ("CourtPaid", less("amount"), Kind.CASE_MONEY),
    ("FeeCollected", set_to(juror=HONEST.address), Kind.CASE_MONEY),
    ("Fined", set_to(account=HONEST.address), Kind.SLASH_UNFOUNDED),
    ("SlashReleased", set_to(reporter=HONEST.address), Kind.SLASH_REPORTER),
    ("SlashReleased", set_to(burned=0, rewarded=10**30), Kind.SLASH_SPLIT),
    ("Slashed", less("from_active"), Kind.SLASH_SHARE),
]


async def test_a_jury_whose_block_nobody_shows_is_noted_and_its_own_run_still_told(
    net: Scenario,
) -> None:
    recording, view = await disputed(net), Ledger()
    for event in recording.events:
        view.apply(event)
    observed = await observe(recording.chain, view)
    assert [draw.block_number for draw in view.draws.values()] > list(observed.draw_hashes)
    unknown = dataclasses.replace(observed, draw_hashes={})
    check = juries(view, unknown)
    assert (check.passed, check.detail) == (True, "0 of 1 juries drawn again")
    assert "nobody showed the hash of block" in check.notes[0]
    (case,) = view.cases.values()
    case.jurors = (VALIDATORS[2].address,)
    assert not juries(view, unknown).passed
    # Contracts of some L2s count the L1's blocks, whose hashes this chain does not have.
    elsewhere = dataclasses.replace(observed, draw_hashes={case.draw_block - 999: bytes(32)})
    case.jurors, case.draw_block = (JURORS[0].address,), case.draw_block - 999
    assert juries(view, elsewhere).notes


async def test_audit_contradicts_signers_who_pay_for_what_no_jury_overturned(net: Scenario) -> None:
    """Each slash that hits another account or run than the one at fault."""
    recording = await disputed(net)
    fines = [i for i, e in enumerate(recording.events) if e.name == "Slashed"]
    at = next(i for i in fines if recording.events[i].args["verdict"].tag == 1)
    for changes, expected in (
        ({"owner": VALIDATORS[2].address}, Kind.SLASH_UNFOUNDED),
        ({"run_id": 0}, Kind.SLASH_OTHER_RUN),
        ({"owner": JURORS[0].address}, Kind.SLASH_UNFOUNDED),
    ):
        twin = list(recording.events)
        args = twin[at].args
        subject = dataclasses.replace(args["verdict"], **changes)
        twin[at] = dataclasses.replace(twin[at], args={**args, **changes, "verdict": subject})
        assert expected in kinds(await recording.report(twin)), changes


async def acquitted(net: Scenario) -> Recording:
    """Two frauds executed, the first overturned: its stake comes back, less the second's share."""
    submissions = [net.submission(CHEATER, index) for index in range(2)]
    first, _ = [await convict(net, submission) for submission in submissions]
    await net.dispute(first, submissions[0], CHEATER, ACCEPT)
    return await record(net)


async def test_audit_follows_stake_that_comes_back() -> None:
    async with network() as net:
        report = await (await acquitted(net)).report()
        assert kinds(report) == set()
        states = [(slash.state, slash.amount_wei) for slash in report.slashes]
        assert states == [("restored", str(25 * TOKEN)), ("escrowed", str(25 * TOKEN))]


ACQUITTED: list[Tampering] = [
    ("SlashFollowed", less("amount"), Kind.SLASH_FOLLOWED),
    ("SlashFollowed", set_to(from_escrow_id=bytes(32)), Kind.SLASH_FOLLOWED),
    ("SlashRestored", set_to(returned=0), Kind.EVENT_ORDER),
    ("CaseClosed", set_to(status=2, ruling=CHEATED), Kind.SLASH_VERDICT),
    ("WorkerAcquitted", set_to(worker=HONEST.address), Kind.SLASH_VERDICT),
]


async def upheld(net: Scenario) -> Recording:
    """A claim that the jury did not confirm, and a juror that did not vote."""
    submission = net.submission(HONEST, 0)
    batch_id = await net.judge(submission, accepted(1, submission))
    proof, chain = await net.proof(batch_id, 0), net.of(ORCHESTRATOR)
    case_id = await net.claim(proof, submission, HONEST, REJECT)
    voting, absent = (jury := await net.draw(case_id))[:2], jury[2]
    await net.vote(case_id, dict.fromkeys(voting, ACCEPT))
    await net.pass_time(PARAMETERS.vote_reveal_s)
    await chain.court.settle(proof)
    await chain.court.fine_absent_juror(case_id, absent.address)
    await chain.court.collect_fee(case_id, voting[0].address)
    return await record(net)


UPHELD: list[Tampering] = [
    ("BatchCommitted", set_to(units=10**6), Kind.BATCH_UNITS),
    ("VoteRevealed", set_to(ruling=REJECT.number), Kind.CASE_MONEY),
    ("ClaimSettled", set_to(returned=10 * TOKEN), Kind.CASE_MONEY),
    ("CaseClosed", set_to(fee=2 * TOKEN), Kind.CASE_MONEY),
    ("CaseClosed", set_to(reporter=CHALLENGER.address), Kind.CASE_MONEY),
    ("Slashed", set_to(owner=HONEST.address), Kind.SLASH_UNFOUNDED),
    ("Slashed", with_verdict(tag=7), Kind.SLASH_UNFOUNDED),
    ("Slashed", set_to(run_id=1), Kind.SLASH_OTHER_RUN),
    ("Fined", set_to(account=HONEST.address), Kind.SLASH_UNFOUNDED),
]


async def penniless(net: Scenario) -> Recording:
    """Jurors overturn an acceptance for three reasons, and the run's owner took its money back."""
    submission = net.submission(HONEST, 0)
    batch_id = await net.judge(submission, accepted(1, submission))
    proof, owner = await net.proof(batch_id, 0), net.of(OWNER)
    case_id = await net.claim(proof, submission, HONEST, REJECT)
    reasons = (Reason.PROOF_COUNT, Reason.LATE, Reason.SCHEMA)
    votes = [Ruling(Verdict.REJECTED, reason) for reason in reasons]
    await net.vote(case_id, dict(zip(await net.draw(case_id), votes, strict=True)))
    await owner.runs.close_run(net.run_id)
    await owner.escrow.reclaim(net.run_id)
    await owner.court.settle(proof)
    for juror in (await net.view()).cases[case_id].jurors:
        await owner.court.collect_fee(case_id, juror)
    return await record(net)


PENNILESS: list[Tampering] = [
    ("CourtPaid", set_to(amount=1), Kind.CASE_MONEY),
    ("ClaimSettled", set_to(returned=PARAMETERS.bond), Kind.CASE_MONEY),
    ("CaseClosed", set_to(ruling=REJECT.number), Kind.CASE_VERDICT),
    ("CaseClosed", less("fee"), Kind.CASE_MONEY),
]


async def test_a_run_without_money_has_no_case_judged_for_nothing(net: Scenario) -> None:
    recording = await penniless(net)
    assert kinds(await recording.report()) == set()
    (case,) = (await net.view()).cases.values()
    fees = PARAMETERS.jury_size * PARAMETERS.juror_fee
    assert case.returned_wei == {0: PARAMETERS.bond - fees}
    assert case.collected == set(case.jurors)


async def test_an_absent_juror_pays_with_its_stake_on_the_bench(net: Scenario) -> None:
    (slash,) = (await (await upheld(net)).report()).slashes
    assert (slash.run_id, slash.offence) == (0, "absent_juror")


async def quarrelled(net: Scenario) -> Recording:
    """Three cases at once: two claims of which one is right, a jury of no one mind, and work that
    the run's validators could not see.
    """
    submissions = [net.submission(HONEST, index) for index in range(3)]
    records = [accepted(1, submissions[0]), accepted(1, submissions[1]), unseen(submissions[2])]
    batch_id = await net.commit(submissions)
    await net.post(batch_id, submissions, records)
    court, proofs = net.of(OWNER).court, [await net.proof(batch_id, i) for i in range(3)]
    two = await net.claim(proofs[0], submissions[0], HONEST, REJECT)
    await net.claim(proofs[0], submissions[0], HONEST, CONVICT, OWNER)
    torn = await net.claim(proofs[1], submissions[1], HONEST, REJECT)
    seen = await net.claim(proofs[2], submissions[2], HONEST, ACCEPT)
    await net.vote(two, dict.fromkeys(await net.draw(two), REJECT))
    first, second, third = await net.draw(torn)
    await net.vote(torn, {first: ACCEPT, second: REJECT, third: None})
    await net.vote(seen, dict.fromkeys(await net.draw(seen), ACCEPT))
    for proof in proofs:
        await court.settle(proof)
    return await record(net)


async def contested(net: Scenario) -> Recording:
    """Two claimants are right, and a third is not; the last to claim announced first."""
    submission = net.submission(CHEATER, 0)
    batch_id = await net.judge(submission, accepted(2, submission))
    proof, court = await net.proof(batch_id, 0), net.of(CHALLENGER).court
    leaf = (await net.of(OWNER).ledger.standing_of(proof)).leaf
    await court.announce(claim_announcement(CHALLENGER.address, leaf, CONVICT, SALT))
    await net.claim(proof, submission, CHEATER, REJECT, HONEST)
    await net.claim(proof, submission, CHEATER, CONVICT, OWNER)
    case_id = await net.claim(proof, submission, CHEATER, CONVICT, CHALLENGER)
    await net.vote(case_id, dict.fromkeys(await net.draw(case_id), CONVICT))
    await net.of(OWNER).court.settle(proof)
    await net.of(OWNER).ledger.execute_fraud(proof, net.held(proof, submission, CHEATER))
    await net.pass_time(WINDOW_S)
    await net.of(OWNER).ledger.finalise_fraud(proof)
    return await record(net)


async def test_the_reporter_is_who_announced_first_of_those_who_were_right(net: Scenario) -> None:
    recording = await contested(net)
    assert kinds(await recording.report()) == set()
    (case,) = (await net.view()).cases.values()
    assert case.reporter == CHALLENGER.address
    # The other right claimant, the wrong one and nobody, paid by every event that names one.
    for impostor in (OWNER.address, HONEST.address, ZERO_ADDRESS):
        twin = [
            dataclasses.replace(event, args={**event.args, "reporter": impostor})
            if "reporter" in event.args
            else event
            for event in recording.events
        ]
        assert Kind.CASE_MONEY in kinds(await recording.report(twin)), impostor


def unseen(submission: Submission) -> OutcomeRecord:
    return dataclasses.replace(rejected(1, submission), reason=Reason.FILE_UNAVAILABLE)


async def test_audit_follows_every_end_that_a_case_can_have(net: Scenario) -> None:
    recording = await quarrelled(net)
    assert kinds(await recording.report()) == set()
    two, torn, seen = (await net.view()).cases.values()
    # First the wrong claimant pays the jurors, then nobody does, then a right claimant does.
    assert list(two.returned_wei.values()) == [10 * TOKEN, 0]
    assert (list(torn.returned_wei.values()), torn.fee_wei) == ([10 * TOKEN], 0)
    assert (list(seen.returned_wei.values()), seen.fee_wei) == ([7 * TOKEN], TOKEN)
    settled = [i for i, e in enumerate(recording.events) if e.name == "ClaimSettled"]
    for at in settled:
        event = recording.events[at]
        twin = list(recording.events)
        paid_back = event.args["returned"] + TOKEN
        twin[at] = dataclasses.replace(event, args={**event.args, "returned": paid_back})
        assert kinds(await recording.report(twin)) == {Kind.CASE_MONEY}


# ----------------------------------------------------------------- unjudged work


async def unjudged(net: Scenario) -> Recording:
    """A quorum says that a batch is withheld: one of its submissions goes before a jury, which
    accepts it; the rest is void.
    """
    submissions = [net.submission(HONEST, 0), net.submission(CHEATER, 0)]
    batch_id = await net.commit(submissions)
    await net.post(batch_id, submissions, [])
    own = await net.split_off(batch_id, submissions, 0, HONEST)
    await net.pass_time(1)
    await net.judge_by_jury(own, submissions[0], HONEST, ACCEPT)
    await net.pass_time(WINDOW_S)
    view, chain = await net.view(), net.of(OWNER)
    await chain.ledger.void_batch(view.batches[batch_id].header())
    await net.of(HONEST).escrow.claim([(await net.view()).batches[own].claim([0])])
    return await record(net)


async def test_audit_follows_work_that_its_run_left_unjudged() -> None:
    async with network() as net:
        report = await (await unjudged(net)).report()
        assert kinds(report) == set()
        (run,) = report.runs
        # A submission that was split off is counted once.
        assert (run.batches, run.judged, run.submitted, run.accepted) == (2, 1, 2, 1)
        assert run.paid_wei == str(1000 * PRICE)


UNJUDGED: list[Tampering] = [
    ("BatchWithheld", one_signature, Kind.OUTCOME_QUORUM),
    ("BatchWithheld", strangers_signature, Kind.OUTCOME_STRANGER),
    ("BatchWithheld", set_to(signers=1), Kind.OUTCOME_SIGNATURE),
    ("BatchSplit", with_work(node_signature=bytes(65)), Kind.DIRECT_SIGNATURE),
    ("BatchSplit", set_to(from_batch_id=2), Kind.BATCH_SPLIT),
    ("OutcomesPosted", flipped_verdict, Kind.OUTCOME_QUORUM),
    ("OutcomesPosted", more_units, Kind.OUTCOME_QUORUM),
    ("CaseOpened", set_to(case_id=bytes(32)), Kind.OUTCOME_QUORUM),
    ("CaseOpened", set_to(worker=CHEATER.address), Kind.CASE_UNFOUNDED),
    ("Claimed", with_submission(units=1), Kind.CASE_UNFOUNDED),
    ("VoteRevealed", set_to(ruling=REJECT.number), Kind.CASE_MONEY),
    ("CaseClosed", set_to(ruling=REJECT.number), Kind.CASE_VERDICT),
    ("CaseClosed", set_to(status=2), Kind.CASE_VERDICT),
    ("CourtPaid", less("amount"), Kind.CASE_MONEY),
    ("BondReturned", less("amount"), Kind.CASE_MONEY),
    ("BatchVoided", set_to(batch_id=2), Kind.BATCH_VOID),
    ("RewardFreed", less("amount"), Kind.BATCH_VOID),
]


async def junk(net: Scenario) -> Recording:
    """A worker claims 1,000 units for one; what nobody is paid for goes back to the run."""
    claimed = net.submission(CHEATER, 0)
    batch_id = await net.submit_direct(claimed, CHEATER)
    await net.post(batch_id, [claimed], [rejected(2, dataclasses.replace(claimed, units=1))])
    assert (await net.view()).runs[net.run_id].reserved_wei == PRICE
    await net.pass_time(WINDOW_S)
    await net.of(OWNER).escrow.recover([(await net.view()).batches[batch_id].claim([0])])
    run = (await net.view()).runs[net.run_id]
    assert (run.reserved_wei, run.available_wei) == (0, run.funded_wei)
    return await record(net)


JUNK: list[Tampering] = [
    ("RewardFreed", less("amount"), Kind.OUTCOME_UNITS),
    ("RewardFreed", less("amount", -1), Kind.OUTCOME_UNITS),
    ("RewardFreed", set_to(run_id=2), Kind.OUTCOME_UNITS),
    ("RewardFreed", set_to(run_id=2), Kind.EVENT_ORDER),
]


async def test_audit_finds_money_that_was_freed_twice(net: Scenario) -> None:
    recording = await junk(net)
    at = next(i for i, e in enumerate(recording.events) if e.name == "RewardFreed")
    twice = dataclasses.replace(recording.events[at], log_index=99)
    twin = [*recording.events[: at + 1], twice, *recording.events[at + 1 :]]
    assert Kind.EVENT_ORDER in kinds(await recording.report(twin))


async def misnamed(net: Scenario) -> Recording:
    """Two submissions for a slot that no record names: the batch holds one of them."""
    first = net.submission(CHEATER, 0)
    second = dataclasses.replace(first, file_hash=keccak(b"another"))
    proof = await net.proof(await net.judge(first, rejected(2, net.submission(CHEATER, 5))), 0)
    signature = net.node_signature(second, CHEATER)
    await net.of(CHALLENGER).faults.prove_double_submission(
        proof, net.held(proof, first, CHEATER), second, signature
    )
    return await record(net)


MISNAMED: list[Tampering] = [
    ("Slashed", less("from_active"), Kind.SLASH_SHARE),
    ("RunCreated", with_terms(exact_fraud_ppm=10**6), Kind.SLASH_SHARE),
]


async def played(net: Scenario) -> Recording:
    await play(net)
    return await record(net)


@pytest.mark.parametrize(
    ("story", "tamperings"),
    [
        (played, PLAYED),
        (disputed, DISPUTED),
        (acquitted, ACQUITTED),
        (upheld, UPHELD),
        (penniless, PENNILESS),
        (unjudged, UNJUDGED),
        (junk, JUNK),
        (misnamed, MISNAMED),
    ],
)
async def test_audit_rejects_every_tampered_twin(
    net: Scenario, story: Callable[[Scenario], Awaitable[Recording]], tamperings: list[Tampering]
) -> None:
    await reject_twins(await story(net), tamperings)


async def test_audit_finds_a_payment_of_no_run(net: Scenario) -> None:
    recording = await played(net)
    twin = [
        dataclasses.replace(event, args={**event.args, "run_id": RunId(2)})
        if event.name == "RewardClaimed"
        else event
        for event in recording.events
    ]
    assert Kind.PAYMENT_RUN in kinds(await recording.report(twin))


async def test_audit_finds_a_submission_that_counts_twice(net: Scenario) -> None:
    recording = await unjudged(net)
    at = next(i for i, e in enumerate(recording.events) if e.name == "BatchSplit")
    split = recording.events[at]
    twice = dataclasses.replace(split, args={**split.args, "batch_id": 1})
    twin = [*recording.events[: at + 1], dataclasses.replace(twice, log_index=99)]
    assert Kind.BATCH_SPLIT in kinds(await recording.report(twin))


async def test_a_bond_is_lost_when_the_jury_does_not_accept_the_work(net: Scenario) -> None:
    submission = net.submission(HONEST, 0)
    batch_id = await net.submit_direct(submission, HONEST)
    await net.pass_time(PARAMETERS.outcome_deadline_s)
    await net.judge_by_jury(batch_id, submission, HONEST, REJECT)
    recording = await record(net)
    tampered: list[Tampering] = [
        ("CaseClosed", set_to(ruling=ACCEPT.number), Kind.CASE_VERDICT),
        ("CaseClosed", set_to(fee=0), Kind.CASE_MONEY),
    ]
    await reject_twins(recording, tampered)
    court = (await net.view()).cases[summons_of(batch_id)]
    assert (court.ruling, court.fee_wei) == (REJECT.number, TOKEN)


async def test_audit_of_a_late_start_does_not_stop(net: Scenario) -> None:
    """With any part of the events missing, the report is still made, and fails."""
    for recording in (await upheld(net), await unjudged(net)):
        for start in range(1, len(recording.events), 3):
            assert not (await recording.report(recording.events[start:])).passed


# ---------------------------------------------------------------------- command


async def test_command_prints_json_and_exits_0_when_nothing_contradicts(
    net: Scenario, tmp_path: Path
) -> None:
    await play(net)
    result = await run_command(net, tmp_path, "--json", "--run", "1")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sorted(found) == sorted(
        (
            *("chain_id", "block", "runs", "workers", "batches", "slashes", "payments"),
            *("checks", "contradictions"),
        )
    )
    assert all(check["passed"] for check in found["checks"])
    assert found["batches"] == 2


async def test_command_prints_tables_with_transactions(net: Scenario, tmp_path: Path) -> None:
    await play(net)
    result = await run_command(net, tmp_path)
    slash = (await net.view()).slashes[0]
    assert slash.tx_hash in result.stdout
    assert "no contradiction in 22 checks" in result.stdout


async def test_command_exits_1_when_something_contradicts(net: Scenario, tmp_path: Path) -> None:
    submission = net.submission(HONEST, 0)
    for _ in range(2):
        await net.judge(submission, accepted(1, submission))
    result = await run_command(net, tmp_path)
    assert result.exit_code == 1
    assert "FAIL every slot settles once" in result.stdout


async def test_audit_of_an_unknown_run_is_refused(tmp_path: Path) -> None:
    async with network(with_run=False) as net:
        save_deployment(tmp_path, net.deployment)
        with pytest.raises(ConfigError, match="no run 3"):
            (await read(HistorySource((net.anvil.rpc_url,), tmp_path))).report(RunId(3))


async def test_audit_of_a_chain_without_runs_passes(tmp_path: Path) -> None:
    async with network(with_run=False) as net:
        save_deployment(tmp_path, net.deployment)
        report = (await read(HistorySource((net.anvil.rpc_url,), tmp_path))).report()
        assert report.passed
        assert (report.runs, report.workers, report.batches) == ((), (), 0)
