"""`muster dispute settle` where the orchestrator stopped after it posted: an auditor's account
takes the stake of frauds, shares it when they are final, and frees batches that nobody judged.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from chain_scenario import (
    CHALLENGER,
    CHEATER,
    CONVICT,
    EXACT_FRAUD_PPM,
    FRAUD_PPM,
    HONEST,
    PARAMETERS,
    TOKEN,
    VALIDATORS,
    WINDOW_S,
    Person,
    Scenario,
    accepted,
    fraud,
    network,
)
from click.testing import CliRunner

from muster.api import BatchEntry
from muster.app.cli import muster
from muster.chain import PauseCause, SlashState, save_deployment
from muster.chain.structs import Offence
from muster.protocol.encoding import keccak
from muster.protocol.messages import Submission
from muster.wallet import save_wallet

STAKE = 100 * TOKEN
JURY_S = PARAMETERS.vote_commit_s + PARAMETERS.vote_reveal_s


@pytest_asyncio.fixture
async def net() -> AsyncIterator[Scenario]:
    async with network() as opened:
        yield opened


async def settle(net: Scenario, folder: Path, place: str, *words: str) -> Any:
    """Run the command with the keystore of an auditor, who has no part in the run."""
    keystore = folder / "auditor.json"
    save_deployment(folder, net.deployment)
    if not keystore.exists():
        save_wallet(keystore, CHALLENGER.key, "secret", light=True)
    flags = ["--keystore", str(keystore), "--rpc", net.anvil.rpc_url, "--deployments", str(folder)]
    return await asyncio.to_thread(
        CliRunner().invoke,
        muster,
        ["dispute", "settle", place, *flags, *words],
        env={"MUSTER_PASSWORD": "secret"},
    )


async def staked(net: Scenario, worker: Person = CHEATER) -> int:
    return await net.of(worker).vault.active_stake(net.run_id, worker.address)


async def kept(net: Scenario, folder: Path, *submissions: Submission) -> Path:
    """Return a copy of an orchestrator's files, as an auditor has made one."""
    (folder / "files").mkdir()
    workers = {person.address: person for person in (HONEST, CHEATER)}
    for each in submissions:
        work = await net.work(each, workers[each.worker])
        entry = BatchEntry(
            submission=each,
            signature=work.node_signature,
            ticket=work.ticket,
            ticket_signature=work.ticket_signature,
            received_at=0,
        )
        path = folder / "files" / f"{each.file_hash.hex()}.json"
        path.write_text(entry.model_dump_json())
    return folder / "files"


async def test_an_accomplices_claim_without_a_proof_shelters_nobody(
    net: Scenario, tmp_path: Path
) -> None:
    works = [net.submission(HONEST, 0), net.submission(CHEATER, 0)]
    batch_id = await net.commit(works)
    await net.post(batch_id, works, [accepted(1, works[0]), accepted(2, works[1])])
    place, proof = f"{batch_id}:1", await net.proof(batch_id, 1)
    case_id = await net.claim(proof, works[1], CHEATER, CONVICT, CHEATER, proves=False)
    jury = await net.draw(case_id)
    await net.pass_time(PARAMETERS.vote_commit_s // 2)
    await net.vote(case_id, dict.fromkeys(jury, CONVICT))
    unshown = await settle(net, tmp_path, place)
    assert unshown.exit_code == 0, unshown.output
    assert "nobody is fined without a proof of what is held: no source shows" in unshown.stderr
    assert (await net.view()).slashes == []
    files = await kept(net, tmp_path, *works)
    shown = await settle(net, tmp_path, place, "--evidence", str(files), "--json")
    assert shown.exit_code == 0, shown.output
    assert "proved what the batch holds" in shown.stderr
    assert set(json.loads(shown.stdout)["sent"]) == {"prove", "execute"}
    view = await net.view()
    fined = {s.owner for s in view.slashes if s.offence is Offence.WRONG_VERDICT}
    assert fined == set(view.batches[batch_id].signed_by(view.runs[net.run_id].seats))
    assert await staked(net) == STAKE - STAKE * FRAUD_PPM // 10**6
    again = await settle(net, tmp_path, place, "--json")
    assert json.loads(again.stdout)["sent"] == {}


async def test_auditor_who_wins_a_case_takes_the_stake_and_is_paid_its_share(
    net: Scenario, tmp_path: Path
) -> None:
    honest, submission = net.submission(HONEST, 0), net.submission(CHEATER, 0)
    batch_id = await net.commit([honest, submission])
    await net.post(batch_id, [honest, submission], [accepted(1, honest), accepted(2, submission)])
    place, proof = f"{batch_id}:1", await net.proof(batch_id, 1)
    none = await settle(net, tmp_path, place)
    assert "has no case, and stands as no fraud" in str(none.exception)
    case_id = await net.claim(proof, submission, CHEATER, CONVICT)
    await net.vote(case_id, dict.fromkeys(await net.draw(case_id), CONVICT))

    executed = await settle(net, tmp_path, place)
    assert executed.exit_code == 0, executed.output
    assert "settled the case" in executed.stderr
    assert f"executed the fraud: took 10 tokens of {CHEATER.address}" in executed.stderr
    assert "the stake is held until" in executed.stderr
    assert await staked(net) == STAKE - STAKE * FRAUD_PPM // 10**6
    [slash] = [s for s in (await net.view()).slashes if s.owner == CHEATER.address]
    assert slash.state is SlashState.ESCROWED

    await net.pass_time(WINDOW_S)
    before = await net.of(CHALLENGER).token.balance_of(CHALLENGER.address)
    share = min(slash.amount_wei * PARAMETERS.reporter_ppm // 10**6, PARAMETERS.reporter_cap)
    finalised = await settle(net, tmp_path, place, "--json")
    assert finalised.exit_code == 0, finalised.output
    assert set(json.loads(finalised.stdout)["sent"]) == {"finalise"}
    after = await net.of(CHALLENGER).token.balance_of(CHALLENGER.address)
    assert after - before == share > 0
    again = await settle(net, tmp_path, place, "--json")
    assert (again.exit_code, json.loads(again.stdout)["sent"]) == (0, {})


async def test_fraud_without_a_case_is_executed_from_a_copy_of_its_batch(
    net: Scenario, tmp_path: Path
) -> None:
    honest, submission = net.submission(HONEST, 0), net.submission(CHEATER, 0)
    batch_id = await net.commit([honest, submission])
    await net.post(batch_id, [honest, submission], [accepted(1, honest), fraud(2, submission)])
    place, files = f"{batch_id}:1", await kept(net, tmp_path, honest, submission)
    unshown = await settle(net, tmp_path, place)
    assert "no source" in str(unshown.exception) or "submissions of batch" in str(unshown.exception)
    assert "--evidence" in str(unshown.exception.hint)

    pause = (net.run_id, PauseCause.CORRELATED_FAILURES, 0, keccak(b"evidence"))
    await net.of(VALIDATORS[0]).runs.pause_slashing(*pause)
    waits = await settle(net, tmp_path, place, "--evidence", str(files))
    assert "slashing in run 1 is paused until" in waits.stderr
    assert await staked(net) == STAKE
    await net.pass_time(PARAMETERS.slash_pause_s)

    # The worker leaves; its stake is taken all the same.
    await net.of(CHEATER).workers.exit(net.run_id)
    executed = await settle(net, tmp_path, place, "--evidence", str(files))
    assert executed.exit_code == 0, executed.output
    stake = (await net.view()).stake(net.run_id, CHEATER.address)
    assert stake.unbonding_wei == STAKE - STAKE * EXACT_FRAUD_PPM // 10**6
    await net.pass_time(WINDOW_S)
    finalised = await settle(net, tmp_path, place)
    assert "released the stake" in finalised.stderr
    assert "reporter" not in finalised.stderr
    done = await settle(net, tmp_path, place)
    assert (done.exit_code, done.stderr.strip()) == (0, "nothing was left to do")


async def test_fraud_is_executed_while_a_wrong_claim_keeps_its_case_open(
    net: Scenario, tmp_path: Path
) -> None:
    submission = net.submission(CHEATER, 0)
    batch_id = await net.judge(submission, fraud(2, submission))
    proof = await net.proof(batch_id, 0)
    await net.claim(proof, submission, CHEATER, CONVICT, claimant=HONEST)
    found = await settle(net, tmp_path, f"{batch_id}:0")
    assert "executed the fraud" in found.stderr
    assert "the stake is held until the case about it is closed" not in str(found.exception)
    assert "CourtPhaseOpen" in str(found.exception)
    assert await staked(net) == STAKE - STAKE * EXACT_FRAUD_PPM // 10**6


async def test_batch_that_nobody_judged_is_declared_void(net: Scenario, tmp_path: Path) -> None:
    batch_id = await net.commit([net.submission(HONEST, 0)])
    early = await settle(net, tmp_path, f"{batch_id}:0")
    assert "it can be declared void from" in early.stderr
    await net.pass_time(PARAMETERS.outcome_deadline_s + WINDOW_S)
    found = await settle(net, tmp_path, f"{batch_id}:0", "--json")
    assert set(json.loads(found.stdout)["sent"]) == {"void"}
    view = await net.view()
    assert view.batches[batch_id].is_void
    assert view.runs[net.run_id].reserved_wei == 0
