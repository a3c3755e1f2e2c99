"""Rewards and bonds at the command line, on the real contracts: said, asked, then sent."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from chain_scenario import CHALLENGER, HONEST, PARAMETERS, accepted
from journey_stage import Stage, hint, open_stage, undone

from muster.protocol.errors import ConfigError
from muster.protocol.messages import Submission

CLAIM = ("rewards", "claim", "--run", "1", "--worker", HONEST.address)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with open_stage(tmp_path_factory.mktemp("claim")) as stage:
        stage.keep("anyone", CHALLENGER)
        submission = stage.scenario.submission(HONEST, 0)
        worker_id, _ = await stage.scenario.of(HONEST).workers.worker_of(HONEST.address)
        await stage.scenario.judge(submission, accepted(worker_id, submission))
        await stage.scenario.pass_time(PARAMETERS.challenge_window_s)
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def stage(opened: Stage) -> AsyncIterator[Stage]:
    async with undone(opened) as fresh:
        yield fresh


async def held(stage: Stage) -> int:
    return await stage.scenario.of(HONEST).token.balance_of(HONEST.address)


async def test_claim_says_what_it_pays_and_costs_and_asks_once(stage: Stage) -> None:
    before = await held(stage)
    words = (*CLAIM, "--keystore", stage.key("anyone"))
    refused = await stage.run(*words, run_input="n\n")
    assert refused.exit_code == 1
    assert await held(stage) == before
    assert "tokens to the worker, for 1 submissions" in refused.stderr
    assert "for RewardEscrow.claim: 0.0" in refused.stderr
    assert refused.stderr.count("Claim?") == 1
    found = await stage.json(*words, "--yes")
    assert await held(stage) - before == int(found["claimed_wei"]) > 0
    assert len(found["transactions"]) == 1
    receipt = await stage.scenario.rpc.call("eth_getTransactionReceipt", *found["transactions"])
    assert int(found["cost_wei"]) == int(receipt["gasUsed"], 16) * int(
        receipt["effectiveGasPrice"], 16
    )
    # Nothing is left: nothing is asked, and nothing is sent.
    again = await stage.run(*words)
    assert again.exit_code == 0
    assert "claimable  nothing now" in again.stdout
    assert "Claim?" not in again.stderr


async def test_dry_run_of_a_claim_sends_nothing_and_needs_no_password(stage: Stage) -> None:
    before = await held(stage)
    words = (*CLAIM, "--keystore", stage.key("anyone"), "--password-file", "/nowhere")
    result = await stage.run(*words, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "for RewardEscrow.claim" in result.stderr
    assert "nothing was sent" in result.stderr
    assert await held(stage) == before


async def test_account_without_coin_is_told_where_it_comes_from(stage: Stage) -> None:
    await stage.scenario.rpc.call("anvil_setBalance", CHALLENGER.address, hex(1))
    error = await stage.error(*CLAIM, "--keystore", stage.key("anyone"), "--yes")
    assert isinstance(error, ConfigError)
    assert f"{CHALLENGER.address} holds" in str(error)
    assert "muster rewards claim may take" in str(error)
    assert "muster devnet fund" in hint(error)


# The bond of work that its worker submitted itself


async def submitted_direct(stage: Stage) -> tuple[int, Submission]:
    submission = stage.scenario.submission(HONEST, 1)
    return await stage.scenario.submit_direct(submission, HONEST), submission


async def judge(stage: Stage, batch_id: int, submission: Submission) -> None:
    worker_id, _ = await stage.scenario.of(HONEST).workers.worker_of(HONEST.address)
    await stage.scenario.post(batch_id, [submission], [accepted(worker_id, submission)])


async def test_anyone_sends_a_bond_back_once_its_work_is_judged(stage: Stage) -> None:
    batch_id, submission = await submitted_direct(stage)
    words = ("dispute", "settle", f"{batch_id}:0", "--keystore", stage.key("anyone"))
    before = await held(stage)
    early = await stage.run(*words)
    assert early.exit_code == 0
    assert await held(stage) == before
    await judge(stage, batch_id, submission)
    settled = await stage.run(*words, "--json")
    assert settled.exception is None, settled.output
    assert await held(stage) - before == PARAMETERS.bond
    [transaction] = json.loads(settled.stdout)["sent"].values()
    assert f"returned the bond of 10 tokens to {HONEST.address}, {transaction}" in settled.stderr
    again = await stage.error(*words)
    assert "stands as no fraud" in str(again)
    assert await held(stage) - before == PARAMETERS.bond


async def test_worker_gets_its_bond_though_no_work_waits_any_more(
    stage: Stage, tmp_path: Path
) -> None:
    batch_id, submission = await submitted_direct(stage)
    (tmp_path / "submissions.jsonl").touch()
    keys = ("--keystore", stage.key("node"), "--payer", stage.key("worker"))
    words = ("worker", "submit-direct", "--state-dir", str(tmp_path), *keys)
    unnamed = await stage.error(*words)
    assert "waits for its outcome" in str(unnamed)
    assert "--run" in hint(unnamed)
    before = await held(stage)
    early = await stage.run(*words, "--run", "1", "--yes")
    assert (early.exit_code, early.stdout) == (0, "")
    await judge(stage, batch_id, submission)
    told = await stage.run(*words, "--run", "1", "--dry-run")
    assert f"batch {batch_id} is judged: its bond can come back" in told.stderr
    assert await held(stage) == before
    done = await stage.run(*words, "--run", "1", run_input="y\n")
    assert await held(stage) - before == PARAMETERS.bond
    assert done.stdout.startswith("0x")
    again = await stage.run(*words, "--run", "1")
    assert "no step is due now" in again.stderr
