"""Faults that prove themselves: found on chain and in copies, named, and reported by anybody."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from chain_scenario import (
    CHALLENGER,
    CHEATER,
    HONEST,
    OWNER,
    TOKEN,
    VALIDATORS,
    WINDOW_S,
    Person,
    Scenario,
    accepted,
    network,
    rejected,
)
from click.testing import CliRunner, Result

from muster.api import BatchEntry
from muster.app.cli import muster
from muster.chain import save_deployment
from muster.chain.doubles import Fault
from muster.chain.structs import Offence
from muster.client.audit.contradictions import Kind
from muster.client.audit.evidence import EvidenceFolders, find_faults, report_faults
from muster.client.audit.history import ChainHistory, HistorySource, read
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Submission, Verdict, pack_records
from muster.wallet import save_wallet

FRAUD = Ruling(Verdict.FRAUD, Reason.TOPLOC_MISMATCH)


@pytest_asyncio.fixture
async def net() -> AsyncIterator[Scenario]:
    async with network() as opened:
        yield opened


async def history(net: Scenario) -> ChainHistory:
    return await read(HistorySource((net.anvil.rpc_url,), net.deployment))


async def faults(net: Scenario, *folders: Path) -> list[Fault]:
    found = await history(net)
    return find_faults(found.ledger, found.domain, net.run_id, EvidenceFolders(folders))


def other_records(submission: Submission) -> bytes:
    return pack_records([rejected(2, submission)])


# Two outcomes of one batch


async def show(
    net: Scenario, batch_id: int, submission: Submission, packed: bytes, liar: Person
) -> None:
    """Show on chain what a validator signed about a batch."""
    header = (await net.view()).batches[batch_id].header()
    signature = net.signed_outcomes(batch_id, submission.leaf(), packed, liar)
    await net.of(HONEST).ledger.show_outcomes(header, keccak(packed), packed, signature)


async def equivocate(net: Scenario) -> int:
    """Have a validator sign other outcomes than those that it showed before."""
    submission = net.submission(CHEATER, 0)
    batch_id = await net.commit([submission])
    await show(net, batch_id, submission, other_records(submission), VALIDATORS[0])
    await net.post(batch_id, [submission], [accepted(2, submission)])
    return batch_id


async def test_two_outcomes_on_chain_are_found_reported_and_their_slash_is_founded(
    net: Scenario,
) -> None:
    await equivocate(net)
    assert (await history(net)).report().passed
    (fault,) = await faults(net)
    assert fault.words == f"validator {VALIDATORS[0].address} signed two outcomes of batch 1"
    (done,) = await report_faults(net.of(CHALLENGER), [fault])
    assert (done.refused, (await net.view()).slashes[0].tx_hash) == (None, done.tx)
    assert await faults(net) == []
    report = (await history(net)).report()
    assert report.passed
    assert [(s.offence, s.amount_wei) for s in report.slashes] == [
        ("double_outcome", str(500 * TOKEN))
    ]


async def test_a_second_report_says_that_somebody_was_first(net: Scenario) -> None:
    await equivocate(net)
    found = await faults(net)
    assert (await report_faults(net.of(CHALLENGER), found))[0].tx
    (late,) = await report_faults(net.of(HONEST), found)
    assert (late.tx, late.refused) == (None, "somebody else reported it meanwhile")


async def test_the_same_outcomes_shown_and_posted_are_no_fault(net: Scenario) -> None:
    submission = net.submission(CHEATER, 0)
    batch_id = await net.commit([submission])
    same = pack_records([accepted(2, submission)])
    await show(net, batch_id, submission, same, VALIDATORS[0])
    await net.post(batch_id, [submission], [accepted(2, submission)])
    assert await faults(net) == []


async def test_to_call_a_batch_withheld_and_judge_it_later_is_no_fault(net: Scenario) -> None:
    submission = net.submission(CHEATER, 0)
    batch_id = await net.commit([submission])
    await show(net, batch_id, submission, b"", VALIDATORS[0])
    await net.post(batch_id, [submission], [accepted(2, submission)])
    assert await faults(net) == []


def keep_outcomes(net: Scenario, folder: Path, submission: Submission, **changes: Any) -> None:
    """Keep the outcomes that a validator handed in for the first batch, as orchestrators do."""
    packed = other_records(submission)
    liar = VALIDATORS[0]
    kept = {
        "batch_id": 1,
        "root": hex0x(submission.leaf()),
        "validator": liar.address,
        "records": hex0x(packed),
        "signature": hex0x(net.signed_outcomes(1, submission.leaf(), packed, liar)),
    }
    path = folder / f"1-{liar.address.lower()}.json"
    path.write_text(json.dumps({**kept, **changes}))


async def test_two_outcomes_of_which_a_copy_has_one_are_found(
    net: Scenario, tmp_path: Path
) -> None:
    submission = net.submission(CHEATER, 0)
    await net.judge(submission, accepted(2, submission))
    assert await faults(net) == []
    keep_outcomes(net, tmp_path, submission)
    (fault,) = await faults(net, tmp_path)
    assert (await report_faults(net.of(CHALLENGER), [fault]))[0].tx


async def test_a_copy_cannot_put_words_into_a_validators_mouth(
    net: Scenario, tmp_path: Path
) -> None:
    submission = net.submission(CHEATER, 0)
    await net.judge(submission, accepted(2, submission))
    for changes in (
        {"signature": "0x" + "11" * 65},
        {"validator": VALIDATORS[1].address},
        {"root": "0x" + "11" * 32},
        {"records": "0x"},
    ):
        keep_outcomes(net, tmp_path, submission, **changes)
        assert await faults(net, tmp_path) == [], changes


# Two submissions for one slot


async def keep_entry(net: Scenario, folder: Path, submission: Submission, key: Person) -> None:
    """Keep a submission as orchestrators do: signed by the node of `key`."""
    work = await net.work(submission, key)
    entry = BatchEntry(
        submission=submission,
        signature=work.node_signature,
        ticket=work.ticket,
        ticket_signature=work.ticket_signature,
        received_at=1,
    )
    (folder / f"{submission.file_hash.hex()}.json").write_text(entry.model_dump_json())


def another(submission: Submission) -> Submission:
    """Return another submission for the same slot."""
    return dataclasses.replace(submission, file_hash=keccak(b"another"))


async def test_two_submissions_for_a_slot_are_found_reported_and_their_slash_is_founded(
    net: Scenario, tmp_path: Path
) -> None:
    submission = net.submission(CHEATER, 0)
    await net.judge(submission, accepted(2, submission))
    await keep_entry(net, tmp_path, submission, CHEATER)
    assert await faults(net, tmp_path) == []
    # The second submission was never judged: its worker committed it by itself.
    await net.submit_direct(another(submission), CHEATER)
    assert await faults(net) == []
    (fault,) = await faults(net, tmp_path)
    assert fault.words == f"worker {CHEATER.address} signed two submissions for step 1, index 0"
    (done,) = await report_faults(net.of(CHALLENGER), [fault])
    assert done.tx
    assert await faults(net, tmp_path) == []
    report = (await history(net)).report()
    assert report.passed
    assert [(s.offence, s.amount_wei) for s in report.slashes] == [
        ("double_submission", str(25 * TOKEN))
    ]
    assert {w.address: w.status for w in report.workers}[CHEATER.address] == "banned"


async def test_a_copy_cannot_sign_for_a_worker(net: Scenario, tmp_path: Path) -> None:
    submission = net.submission(CHEATER, 0)
    await net.judge(submission, accepted(2, submission))
    await keep_entry(net, tmp_path, submission, CHEATER)
    # Another worker's node, another run, and bytes that are no submission.
    await keep_entry(net, tmp_path, another(submission), HONEST)
    (tmp_path / f"{'ab' * 32}.json").write_text("{")
    assert await faults(net, tmp_path) == []
    elsewhere = dataclasses.replace(another(submission), run_id=net.run_id + 1)
    await keep_entry(net, tmp_path, elsewhere, CHEATER)
    assert await faults(net, tmp_path) == []


async def test_two_slots_are_no_fault(net: Scenario, tmp_path: Path) -> None:
    for index in range(2):
        submission = net.submission(CHEATER, index)
        await net.judge(submission, accepted(2, submission))
        await keep_entry(net, tmp_path, submission, CHEATER)
    assert await faults(net, tmp_path) == []


# A record of other work than the batch holds


async def misrecord(net: Scenario, folder: Path, **wrong: Any) -> int:
    """Have a quorum record something else than a batch holds, and keep the batch's copy."""
    works = [net.submission(HONEST, 0), net.submission(CHEATER, 0)]
    batch_id = await net.commit(works)
    records = [accepted(1, works[0]), rejected(2, works[1])]
    await net.post(batch_id, works, [records[0], dataclasses.replace(records[1], **wrong)])
    await keep_entry(net, folder, works[0], HONEST)
    await keep_entry(net, folder, works[1], CHEATER)
    root = (await net.view()).batches[batch_id].root
    composed = {"root": hex0x(root), "file_hashes": [hex0x(w.file_hash) for w in works]}
    (folder / f"{root.hex()}.json").write_text(json.dumps({**composed, "composed_ns": 1}))
    return batch_id


async def test_a_record_of_other_work_is_found_reported_and_its_slashes_are_founded(
    net: Scenario, tmp_path: Path
) -> None:
    batch_id = await misrecord(net, tmp_path, file_hash=keccak(b"invented"))
    assert await faults(net) == []
    found = await faults(net, tmp_path)
    assert {fault.words for fault in found} == {
        f"validator {each.address} signed a record of {batch_id}:1 that contradicts its batch"
        for each in VALIDATORS[:2]
    }
    done = await report_faults(net.of(CHALLENGER), found)
    assert all(each.tx for each in done)
    assert await faults(net, tmp_path) == []
    report = (await history(net)).report()
    assert report.passed, report.to_json()
    slashed = [(s.offence, s.amount_wei) for s in report.slashes]
    assert slashed == [("misrecord", str(500 * TOKEN))] * 2
    assert VALIDATORS[0].address not in (await net.view()).runs[net.run_id].validators


async def test_records_of_what_the_batch_holds_and_of_unknown_workers_are_no_fault(
    net: Scenario, tmp_path: Path
) -> None:
    await misrecord(net, tmp_path)
    assert await faults(net, tmp_path) == []
    await misrecord(net, tmp_path, worker_id=0, units=0)
    assert await faults(net, tmp_path) == []


async def test_work_is_contested_though_its_worker_left_before_the_commitment(
    net: Scenario, tmp_path: Path
) -> None:
    await net.of(CHEATER).workers.exit(net.run_id)
    await net.pass_time(1)
    batch_id = await misrecord(
        net, tmp_path, verdict=Verdict.ACCEPTED, reason=Reason.NONE, rollouts=3
    )
    proof, work = await net.proof(batch_id, 1), net.submission(CHEATER, 0)
    unsigned = Ruling(Verdict.REJECTED, Reason.BAD_SIGNATURE)
    case_id = await net.dispute(proof, work, CHEATER, unsigned)
    assert (await net.view()).cases[case_id].overturned
    found = await faults(net, tmp_path)
    assert [fault.offence for fault in found] == [Offence.MISRECORD] * 2
    assert all(each.tx for each in await report_faults(net.of(CHALLENGER), found))
    report = (await history(net)).report()
    # What its signers recorded is contradicted; the case is not.
    assert {each.kind for each in report.contradictions} == {Kind.BATCH_ROOT}


async def test_a_copy_with_another_submission_or_signature_shows_no_misrecord(
    net: Scenario, tmp_path: Path
) -> None:
    await misrecord(net, tmp_path, rollouts=3)
    assert len(await faults(net, tmp_path)) == 2
    work = net.submission(CHEATER, 0)
    await keep_entry(net, tmp_path, work, HONEST)
    assert await faults(net, tmp_path) == []
    await keep_entry(net, tmp_path, dataclasses.replace(work, units=7), CHEATER)
    assert await faults(net, tmp_path) == []


async def test_a_jury_punishes_the_committed_work_whatever_its_record_names(
    net: Scenario, tmp_path: Path
) -> None:
    batch_id = await misrecord(net, tmp_path, file_hash=keccak(b"invented"))
    work, proof = net.submission(CHEATER, 0), await net.proof(batch_id, 1)
    case_id = await net.dispute(proof, work, CHEATER, FRAUD)
    assert (await net.view()).cases[case_id].overturned
    await net.of(OWNER).ledger.execute_fraud(proof, net.held(proof, work, CHEATER))
    (slash,) = (s for s in (await net.view()).slashes if s.position is not None)
    assert (slash.owner, slash.tag) == (CHEATER.address, 1 << 32)
    assert (await history(net)).report().passed
    await net.pass_time(WINDOW_S)
    await net.of(OWNER).ledger.finalise_fraud(proof)
    assert (await history(net)).report().passed


# The command


async def run(net: Scenario, folder: Path, *words: str) -> Result:
    save_deployment(folder, net.deployment)
    flags = ["--rpc", net.anvil.rpc_url, "--deployments", str(folder)]
    environment = {"MUSTER_PASSWORD": "secret"}
    return await asyncio.to_thread(
        CliRunner().invoke, muster, ["audit", "run", "1", *words, *flags], env=environment
    )


async def test_the_command_names_a_fault_and_reports_it_when_told_to(
    net: Scenario, tmp_path: Path
) -> None:
    await equivocate(net)
    named = await run(net, tmp_path)
    assert named.exit_code == 0, named.output
    assert "muster audit run 1 --report --keystore FILE" in " ".join(named.stdout.split())
    assert (await net.view()).slashes == []
    keystore = tmp_path / "me.json"
    save_wallet(keystore, CHALLENGER.key, "secret", light=True)
    words = ("--report", "--keystore", str(keystore))
    (fault,) = json.loads((await run(net, tmp_path, *words, "--json")).stdout)["faults"]
    assert (fault["offence"], fault["account"]) == ("double_outcome", VALIDATORS[0].address)
    assert fault["tx"] == (await net.view()).slashes[0].tx_hash
    again = await run(net, tmp_path, *words)
    assert again.exit_code == 0, again.output
    assert "--report" not in again.stdout


async def test_a_report_needs_a_key_and_a_chain(net: Scenario, tmp_path: Path) -> None:
    for words, problem in (
        (("--report",), "need each other"),
        (("--keystore", "me.json"), "need each other"),
        (("--report", "--keystore", "me.json", "--dump", "x.gz"), "needs a chain"),
    ):
        refused = await run(net, tmp_path, *words)
        assert isinstance(refused.exception, ConfigError), words
        assert problem in str(refused.exception)
