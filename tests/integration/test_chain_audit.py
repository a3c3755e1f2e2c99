"""`muster audit` of a real chain, and of twins of it that somebody tampered with."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chain_scenario import (
    CHEATER,
    HONEST,
    ORCHESTRATOR,
    VALIDATORS,
    WINDOW_S,
    Scenario,
    accepted,
    fraud,
    network,
    play,
    rejected,
)
from click.testing import CliRunner

from muster.chain import Chain, Event, EventReader, save_deployment
from muster.client.audit.command import audit, read_report
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import observe
from muster.client.audit.report import AuditReport, build_report
from muster.protocol.eip712 import sign
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId
from muster.protocol.messages import Verdict


@dataclasses.dataclass
class Recording:
    """The events of a played network, and what its contracts say."""

    events: list[Event]
    chain: Chain

    async def report(self, events: list[Event] | None = None) -> AuditReport:
        view = Ledger()
        for event in self.events if events is None else events:
            view.apply(event)
        observed = await observe(self.chain, view)
        return build_report(view, self.chain.deployment, observed=observed)


async def record(net: Scenario) -> Recording:
    poll = await EventReader(net.of(ORCHESTRATOR)).poll()
    return Recording(poll.events, net.of(ORCHESTRATOR))


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


async def test_audit_finds_no_contradiction_in_an_honest_chain() -> None:
    async with network() as net:
        await play(net)
        report = await (await record(net)).report()
        assert failed(report) == set()
        assert report.passed


async def test_audit_figures_are_those_of_the_chain() -> None:
    async with network() as net:
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

Tampering = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]


def other_wallet(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, "worker": HONEST.address}


def set_to(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda args: {**args, **changes}


def with_terms(args: dict[str, Any], **changes: int) -> dict[str, Any]:
    terms = dataclasses.replace(args["config"].terms, **changes)
    return {**args, "config": dataclasses.replace(args["config"], terms=terms)}


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


ROOTS = "batch roots commit to the submissions that were judged"
OUTCOMES = "outcomes roots follow from the records"
QUORUM = "a quorum of the validators of that time signed every outcome"
PAYMENTS = "payments are units × price, for accepted slots that are final"
SLASHES = "slashes are the run's share of the stake, for fraud verdicts"
SPLITS = "released slashes are split without profit for judges"
EVENTS = "events follow from one another"
SUMS = "sums equal what the contracts hold"

TAMPERINGS: list[Tampering] = [
    ("OutcomesPosted", flipped_verdict, OUTCOMES),
    ("OutcomesPosted", more_units, QUORUM),
    ("OutcomesPosted", one_signature, QUORUM),
    ("OutcomesPosted", doubled_signature, QUORUM),
    ("OutcomesPosted", strangers_signature, QUORUM),
    ("OutcomesPosted", high_s_signature, QUORUM),
    ("OutcomesPosted", set_to(outcomes_root=bytes(32)), OUTCOMES),
    ("BatchCommitted", set_to(root=bytes(32)), QUORUM),
    ("BatchCommitted", set_to(count=7), EVENTS),
    ("BatchCommitted", set_to(batch_id=9), EVENTS),
    ("RewardClaimed", set_to(units=10**6), PAYMENTS),
    ("RewardClaimed", set_to(amount=1), PAYMENTS),
    ("RewardClaimed", set_to(slots=4), PAYMENTS),
    ("RewardClaimed", set_to(worker=CHEATER.address), PAYMENTS),
    ("Slashed", set_to(from_active=10**18), SLASHES),
    ("Slashed", set_to(owner=HONEST.address), SLASHES),
    ("Slashed", set_to(offence=bytes(32)), SLASHES),
    ("FraudExecuted", set_to(position=0), SLASHES),
    ("FraudExecuted", set_to(position=99), SLASHES),
    ("FraudExecuted", set_to(batch_id=77), SLASHES),
    ("WorkerBanned", set_to(worker=HONEST.address), SLASHES),
    ("SlashReleased", set_to(burned=0, insured=0, rewarded=25 * 10**18), SPLITS),
    ("SlashReleased", set_to(rewarded=10**18), SPLITS),
    ("Deposited", set_to(amount=1), EVENTS),
    ("RunFunded", set_to(amount=10**30), SUMS),
    ("WorkerRegistered", set_to(worker_id=5), EVENTS),
    (
        "CheckpointPublished",
        set_to(version=8),
        "accepted work is by registered workers, for policies that were published",
    ),
    (
        "RunCreated",
        lambda args: with_terms(args, quorum=3),
        QUORUM,
    ),
    (
        "BatchCommitted",
        set_to(price_per_unit=1),
        PAYMENTS,
    ),
    (
        "RunCreated",
        lambda args: with_terms(args, exact_fraud_ppm=10**6),
        SLASHES,
    ),
    (
        "ValidatorSeated",
        set_to(validator=CHEATER.address),
        QUORUM,
    ),
    (
        "DirectlySubmitted",
        set_to(node_signature=bytes(65)),
        "direct submissions are signed by their worker's node",
    ),
]


async def test_audit_rejects_every_tampered_twin() -> None:
    async with network() as net:
        await play(net)
        recording = await record(net)
        for name, change, expected in TAMPERINGS:
            at = next(i for i, event in enumerate(recording.events) if event.name == name)
            twin = list(recording.events)
            twin[at] = dataclasses.replace(twin[at], args=change(twin[at].args))
            report = await recording.report(twin)
            assert expected in failed(report), (name, failed(report))


async def test_audit_rejects_a_chain_with_any_event_left_out() -> None:
    async with network() as net:
        await play(net)
        recording = await record(net)
        # Nothing depends on these: without them there is only less to see.
        harmless = {"FraudFinalised", "DirectlySubmitted", "StakeHeld"}
        for at, event in enumerate(recording.events):
            report = await recording.report(recording.events[:at] + recording.events[at + 1 :])
            assert report.passed == (event.name in harmless), event.name


async def test_audit_counts_roots_that_cannot_be_proven() -> None:
    async with network() as net:
        claimed, judged = net.submission(CHEATER, 0), net.submission(CHEATER, 0, units=999)
        batch_id = await net.commit([claimed])
        await net.post(batch_id, [claimed], [fraud(2, judged)])
        await net.commit([net.submission(HONEST, 0)])
        report = await (await record(net)).report()
        (roots,) = (check for check in report.checks if check.name == ROOTS)
        assert roots.passed
        assert roots.detail.startswith("0 proven, 2 cannot be")


async def test_audit_finds_accepted_work_that_was_never_committed() -> None:
    async with network() as net:
        claimed, judged = net.submission(HONEST, 0, units=99), net.submission(HONEST, 0, units=10)
        batch_id = await net.commit([claimed])
        # Colluding validators accept other units than the worker ever claimed.
        await net.post(batch_id, [claimed], [accepted(1, judged)])
        assert failed(await (await record(net)).report()) == {ROOTS}


async def test_audit_finds_a_slot_that_was_accepted_twice() -> None:
    async with network() as net:
        submission = net.submission(HONEST, 0)
        for _ in range(2):
            batch_id = await net.commit([submission])
            await net.post(batch_id, [submission], [accepted(1, submission)])
        assert failed(await (await record(net)).report()) == {"every slot settles once"}


async def test_audit_names_fraud_that_nobody_executed() -> None:
    async with network() as net:
        submission = net.submission(CHEATER, 0)
        batch_id = await net.commit([submission])
        await net.post(batch_id, [submission], [fraud(2, submission)])
        report = await (await record(net)).report()
        (slashes,) = (check for check in report.checks if check.name == SLASHES)
        assert slashes.passed
        assert "1 fraud verdicts not executed" in slashes.detail


async def test_audit_accepts_a_slash_of_unbonding_stake() -> None:
    async with network() as net:
        await net.of(CHEATER).vault.request_unbond(33 * 10**18 + 1)
        submission = net.submission(CHEATER, 0)
        records = [fraud(2, submission)]
        batch_id = await net.commit([submission])
        await net.post(batch_id, [submission], records)
        await net.of(ORCHESTRATOR).ledger.execute_fraud(
            await net.proof(batch_id, 0),
            submission,
            net.node_signature(submission, CHEATER),
        )
        report = await (await record(net)).report()
        assert failed(report) == set()
        assert report.slashes[0].state == "escrowed"


# ---------------------------------------------------------------------- command


async def run_command(net: Scenario, folder: Path, *flags: str) -> Any:
    save_deployment(folder, net.deployment)
    arguments = ["--rpc", net.anvil.rpc_url, "--deployments", str(folder), *flags]
    return await asyncio.to_thread(CliRunner().invoke, audit, arguments)


async def test_command_prints_json_and_exits_0_when_nothing_contradicts(tmp_path: Path) -> None:
    async with network() as net:
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


async def test_command_prints_tables_with_transactions(tmp_path: Path) -> None:
    async with network() as net:
        await play(net)
        result = await run_command(net, tmp_path)
        slash = (await net.view()).slashes[0]
        assert slash.tx_hash in result.stdout
        assert "no contradiction in 16 checks" in result.stdout


async def test_command_exits_1_when_something_contradicts(tmp_path: Path) -> None:
    async with network() as net:
        submission = net.submission(HONEST, 0)
        for _ in range(2):
            batch_id = await net.commit([submission])
            await net.post(batch_id, [submission], [accepted(1, submission)])
        result = await run_command(net, tmp_path)
        assert result.exit_code == 1
        assert "FAIL every slot settles once" in result.stdout


async def test_audit_of_an_unknown_run_is_refused(tmp_path: Path) -> None:
    async with network(with_run=False) as net:
        save_deployment(tmp_path, net.deployment)
        with pytest.raises(ConfigError, match="no run 3"):
            await read_report(net.anvil.rpc_url, tmp_path, RunId(3))


async def test_audit_of_a_chain_without_runs_passes(tmp_path: Path) -> None:
    async with network(with_run=False) as net:
        save_deployment(tmp_path, net.deployment)
        report = await read_report(net.anvil.rpc_url, tmp_path)
        assert report.passed
        assert (report.runs, report.workers, report.batches) == ((), (), 0)


# --------------------------------------------------------------------- disputes


async def disputed(net: Scenario) -> Recording:
    """A rejection that a challenger turned into fraud: slashed with a reporter, and final."""
    submission = net.submission(CHEATER, 0)
    records = [rejected(2, submission)]
    batch_id = await net.commit([submission])
    await net.post(batch_id, [submission], records)
    proof, ledger = await net.proof(batch_id, 0), net.of(ORCHESTRATOR).ledger
    await net.dispute(proof, Verdict.FRAUD)
    evidence = net.node_signature(submission, CHEATER)
    await ledger.execute_fraud(proof, submission, evidence)
    await net.pass_time(WINDOW_S)
    await ledger.finalise_fraud(proof)
    return await record(net)


async def test_audit_follows_a_fraud_that_a_challenger_found() -> None:
    async with network() as net:
        report = await (await disputed(net)).report()
        assert failed(report) == set()
        (slash,) = report.slashes
        assert (slash.amount_wei, slash.state) == (str(10 * 10**18), "released")
        assert {w.address: w.fraud for w in report.workers}[CHEATER.address] == 1


CASES = "disputes were decided by validators that had not signed"
DISPUTE_TAMPERINGS: list[Tampering] = [
    ("JuryDrawn", set_to(jurors=(VALIDATORS[0].address,)), EVENTS),
    ("VoteCommitted", set_to(juror=VALIDATORS[0].address), EVENTS),
    ("VoteRevealed", set_to(juror=VALIDATORS[0].address), EVENTS),
    ("VoteRevealed", set_to(overturn=False), EVENTS),
    ("VoteRevealed", set_to(leaf=bytes(32)), EVENTS),
    ("CaseOpened", set_to(position=5), CASES),
    ("CaseOpened", set_to(batch_id=8), CASES),
    ("CaseOpened", set_to(leaf=bytes(32)), CASES),
    ("CaseOpened", set_to(claimed_verdict=2), SLASHES),
    ("CaseOpened", set_to(challenger=HONEST.address), SLASHES),
    ("CaseClosed", set_to(verdict=3), CASES),
    ("CaseClosed", set_to(overturned=False, verdict=3), SLASHES),
    ("Slashed", set_to(reporter=HONEST.address), SLASHES),
    ("SlashReleased", set_to(burned=0, rewarded=10**30), SPLITS),
]


async def test_audit_rejects_every_tampered_dispute() -> None:
    async with network() as net:
        recording = await disputed(net)
        for name, change, expected in DISPUTE_TAMPERINGS:
            at = next(i for i, event in enumerate(recording.events) if event.name == name)
            twin = list(recording.events)
            twin[at] = dataclasses.replace(twin[at], args=change(twin[at].args))
            report = await recording.report(twin)
            assert expected in failed(report), (name, failed(report))


async def test_audit_of_a_late_start_does_not_stop() -> None:
    """Whatever part of the events is missing, the report is made and fails."""
    async with network() as net:
        await play(net)
        recording = await record(net)
        for start in range(1, len(recording.events), 3):
            assert not (await recording.report(recording.events[start:])).passed
