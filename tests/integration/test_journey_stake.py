"""Stake, leave, come back, change the node: at the command line, on the real contracts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fee_oracles
import pytest
import pytest_asyncio
from chain_scenario import (
    CHEATER,
    HONEST,
    OWNER,
    PARAMETERS,
    TOKEN,
    VALIDATORS,
    Person,
    fraud,
    node_of,
)
from journey_stage import Stage, hint, open_stage, undone

from muster.chain import RunTerms, WorkerStatus
from muster.client.preflight import DATA_BYTES, gas_money
from muster.devnet.chain_costs import RESULTS, read_measured
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, NotYet
from muster.protocol.messages import Verdict
from muster.wallet import keystore_address

STRANGER = Person(keccak(b"a stranger"))
ENVELOPE_BYTES = 120
"""Of a signed transaction beside its calldata."""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with open_stage(tmp_path_factory.mktemp("stake")) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def stage(opened: Stage) -> AsyncIterator[Stage]:
    async with undone(opened) as fresh:
        yield fresh


async def status_of(stage: Stage, worker: Person = HONEST) -> WorkerStatus:
    return (await stage.scenario.of(OWNER).workers.worker_of(worker.address)).status


# Leave


async def test_leaving_unbonds_all_and_pays_out_when_it_is_due(stage: Stage) -> None:
    leave = ("unstake", "--keystore", stage.key("worker"), "--yes")
    asked = await stage.json(*leave)
    assert (asked["action"], asked["amount_tokens"]) == ("unbonding", "100")
    assert await status_of(stage) is WorkerStatus.EXITING
    early = await stage.error(*leave)
    assert isinstance(early, NotYet)
    assert "100 tokens can be withdrawn from" in str(early)
    await stage.scenario.pass_time(PARAMETERS.unbonding_s)
    before = await stage.scenario.of(HONEST).token.balance_of(HONEST.address)
    assert (await stage.json(*leave))["action"] == "withdrawn"
    after = await stage.scenario.of(HONEST).token.balance_of(HONEST.address)
    assert after - before == 100 * TOKEN
    assert "has no active stake" in str(await stage.error(*leave))


async def test_leaving_says_when_how_much_and_asks_once(stage: Stage) -> None:
    result = await stage.run("unstake", "--keystore", stage.key("worker"), run_input="n\n")
    assert result.exit_code == 1
    assert "unbonds  100 of 100 tokens" in result.stderr
    assert "in 3 min 20 s" in result.stderr
    assert "worker   leaves" in result.stderr
    assert result.stderr.count("Go on?") == 1
    assert await status_of(stage) is WorkerStatus.ACTIVE


async def test_spare_stake_leaves_and_the_worker_stays(stage: Stage) -> None:
    chain = stage.scenario.of(HONEST)
    await chain.token.faucet(HONEST.address, 5 * TOKEN)
    await stage.json("stake", "--keystore", stage.key("worker"), "--amount", "5", "--yes")
    words = ("unstake", "--keystore", stage.key("worker"), "--amount", "5", "--yes")
    assert (await stage.json(*words))["amount_tokens"] == "5"
    assert await status_of(stage) is WorkerStatus.ACTIVE
    assert await chain.vault.active_stake(HONEST.address) == 100 * TOKEN


async def test_too_little_left_jails_and_is_said_before(stage: Stage) -> None:
    words = ("unstake", "--keystore", stage.key("worker"), "--amount", "1")
    result = await stage.run(*words, run_input="y\n")
    assert "is jailed: it must hold 100 tokens" in result.stderr
    assert await status_of(stage) is WorkerStatus.JAILED


async def test_more_than_is_staked_is_refused(stage: Stage) -> None:
    error = await stage.error("unstake", "--keystore", stage.key("worker"), "--amount", "101")
    assert "101 tokens are asked for, 100 are staked" in str(error)


async def test_asking_for_the_rest_moves_the_date_of_all(stage: Stage) -> None:
    words = ("unstake", "--keystore", stage.key("worker"), "--yes")
    first = await stage.json(*words, "--amount", "1")
    await stage.scenario.pass_time(50)
    rest = await stage.run(*words, "--all", "--json")
    assert "1 tokens that unbond already wait until then too" in rest.stderr
    account = await stage.scenario.of(HONEST).vault.account_of(HONEST.address)
    assert account.withdrawable_at > first["due_at"]
    assert account.unbonding_wei == 100 * TOKEN


async def test_an_open_case_holds_stake_back_for_a_while_and_says_so(stage: Stage) -> None:
    scenario = stage.scenario
    submission = scenario.submission(CHEATER, 0)
    batch_id = await scenario.commit([submission])
    await scenario.post(batch_id, [submission], [fraud(2, submission)])
    evidence = scenario.node_signature(submission, CHEATER)
    proof = await scenario.proof(batch_id, 0)
    await scenario.of(OWNER).ledger.execute_fraud(proof, submission, evidence)
    challenger = scenario.of(OWNER)
    bond = PARAMETERS.challenge_bond
    await challenger.token.approve(scenario.deployment.contracts["DisputeCourt"], bond)
    await challenger.court.challenge(proof, Verdict.ACCEPTED)
    words = ("unstake", "--keystore", stage.key("cheater"), "--yes")
    await stage.json(*words)
    await scenario.pass_time(PARAMETERS.unbonding_s + 1)
    early = await stage.error(*words)
    assert isinstance(early, NotYet)
    assert "held back by 1 open case (muster dispute list)" in str(early)
    await scenario.pass_time(PARAMETERS.unbonding_s)
    assert (await stage.json(*words))["action"] == "withdrawn"


async def test_a_validators_seat_is_pointed_out(stage: Stage) -> None:
    words = ("unstake", "--keystore", stage.key("validator"), "--amount", "1")
    result = await stage.run(*words, run_input="n\n")
    assert "seats    of run 1 can be taken away" in result.stderr


# Come back


async def test_a_jailed_worker_comes_back_after_its_time_and_stake(stage: Stage) -> None:
    await stage.json("unstake", "--keystore", stage.key("worker"), "--amount", "1", "--yes")
    back = ("worker", "rejoin", "--keystore", stage.key("worker"))
    assert isinstance(await stage.error(*back), NotYet)
    await stage.scenario.pass_time(PARAMETERS.jail_time_s)
    short = await stage.error(*back)
    assert "stakes 99 tokens, a worker must hold 100" in str(short)
    assert "--amount 1" in hint(short)
    await stage.scenario.of(HONEST).token.faucet(HONEST.address, TOKEN)
    await stage.json("stake", "--keystore", stage.key("worker"), "--amount", "1", "--yes")
    assert (await stage.json(*back))["active_from_block"] > 0
    assert await status_of(stage) is WorkerStatus.ACTIVE
    assert "is active" in str(await stage.error(*back))


async def test_a_leaving_worker_comes_back_with_fresh_stake(stage: Stage) -> None:
    await stage.json("unstake", "--keystore", stage.key("worker"), "--yes")
    await stage.scenario.of(HONEST).token.faucet(HONEST.address, 100 * TOKEN)
    await stage.json("stake", "--keystore", stage.key("worker"), "--amount", "100", "--yes")
    await stage.json("worker", "rejoin", "--keystore", stage.key("worker"))
    assert await status_of(stage) is WorkerStatus.ACTIVE


async def test_a_banned_worker_does_not_come_back(stage: Stage) -> None:
    scenario = stage.scenario
    submission = scenario.submission(CHEATER, 0)
    batch_id = await scenario.commit([submission])
    await scenario.post(batch_id, [submission], [fraud(2, submission)])
    evidence = scenario.node_signature(submission, CHEATER)
    await scenario.of(OWNER).ledger.execute_fraud(
        await scenario.proof(batch_id, 0), submission, evidence
    )
    error = await stage.error("worker", "rejoin", "--keystore", stage.key("cheater"))
    assert "is banned" in str(error)
    assert "jury" in hint(error)


# Change the node


async def test_rotation_makes_a_node_that_serves_and_retires_the_old_one(stage: Stage) -> None:
    words = ("node", "rotate", "--keystore", stage.key("worker"), "--node", stage.key("node-2"))
    changed = await stage.json(*words, "--light", "--yes")
    assert changed["node"] == keystore_address(Path(stage.key("node-2")))
    assert changed["old_node"] == node_of(HONEST).address
    workers = stage.scenario.of(OWNER).workers
    assert await workers.worker_of_node(changed["node"]) == HONEST.address
    assert (await workers.worker_of(HONEST.address)).node == changed["node"]
    again = (*words[:-1], stage.key("node"))
    assert "RegistryNodeTaken" in str(await stage.error(*again, "--yes"))


async def test_rotation_to_the_cold_key_is_refused(stage: Stage) -> None:
    words = ("node", "rotate", "--keystore", stage.key("worker"), "--node", stage.key("worker"))
    assert "belongs on no working machine" in str(await stage.error(*words, "--yes"))


async def test_rotation_of_a_leaving_worker_is_refused(stage: Stage) -> None:
    await stage.json("unstake", "--keystore", stage.key("worker"), "--yes")
    words = ("node", "rotate", "--keystore", stage.key("worker"), "--node", stage.key("n"))
    assert "is exiting" in str(await stage.error(*words, "--light", "--yes"))


# What comes next


async def test_staking_says_what_comes_next(stage: Stage) -> None:
    words = ("stake", "--keystore", stage.key("worker"), "--amount", "5", "--yes", "--faucet")
    worker = await stage.run(*words)
    assert worker.stdout.startswith("0x")
    assert len(worker.stdout.split()) == 1
    assert f"105 tokens are {HONEST.address}'s active stake now" in worker.stderr
    assert "active now" in worker.stderr
    assert "muster worker run --run RUN --keystore NODE.json" in worker.stderr
    assert f"muster worker status --run RUN --worker {HONEST.address}" in worker.stderr
    key = stage.key("validator")
    validator = await stage.run("stake", "--keystore", key, "--amount", "5", "--yes", "--faucet")
    assert "muster worker run" not in validator.stderr
    assert "a run's owner seats this address, then: muster validator run" in validator.stderr


# Bad input


@pytest.mark.parametrize(
    "words",
    [
        ("stake", "--yes"),
        ("unstake", "--yes"),
        ("worker", "rejoin"),
        ("node", "rotate", "--node", "new.json", "--light", "--yes"),
    ],
    ids=lambda words: words[0] + words[1],
)
async def test_a_nodes_keystore_is_not_a_workers(
    stage: Stage, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = await stage.error(*words, "--keystore", stage.key("node"))
    assert isinstance(error, ConfigError)
    assert f"is the node of worker {HONEST.address}" in str(error)
    assert "worker.json" in hint(error)


async def test_an_account_without_gas_money_is_told_how_much(stage: Stage) -> None:
    key = stage.keep("stranger", STRANGER)
    error = await stage.error("stake", "--keystore", key, "--amount", "1", "--yes")
    assert "holds 0 of the chain's coin, muster stake may take" in str(error)
    assert "muster devnet fund" in hint(error)


async def test_the_faucet_gives_tokens_and_gas_money(stage: Stage) -> None:
    key = stage.keep("stranger", STRANGER)
    words = ("stake", "--keystore", key, "--amount", "7", "--yes")
    assert "holds 0 of the chain's coin" in str(await stage.error(*words))
    assert (await stage.json(*words, "--faucet"))["amount_tokens"] == "7"


async def test_too_few_tokens_are_named_with_what_is_needed(stage: Stage) -> None:
    await stage.scenario.rpc.call("anvil_setBalance", STRANGER.address, hex(10**18))
    key = stage.keep("stranger", STRANGER)
    error = await stage.error("stake", "--keystore", key, "--node", stage.keep("n", STRANGER))
    assert "holds 0 tokens, staking takes 100" in str(error)


async def test_an_unregistered_account_has_nothing_to_come_back_to(stage: Stage) -> None:
    key = stage.keep("stranger", STRANGER)
    await stage.scenario.rpc.call("anvil_setBalance", STRANGER.address, hex(10**18))
    error = await stage.error("worker", "rejoin", "--keystore", key)
    assert "is not registered as a worker" in str(error)
    assert "muster stake" in hint(error)


# Look at runs


async def test_stake_says_what_the_run_slashes(stage: Stage) -> None:
    words = ("stake", "--keystore", stage.key("worker"), "--amount", "1", "--run", "1")
    await stage.scenario.of(HONEST).token.faucet(HONEST.address, TOKEN)
    result = await stage.run(*words, run_input="n\n")
    assert "run 1 takes 10 % for a first statistical fraud" in result.stderr
    assert "25 % for an exact one" in result.stderr
    assert "there is no run 7" in str(await stage.error(*words[:-1], "7"))


async def test_a_run_is_shown_from_the_chain_alone(stage: Stage) -> None:
    scenario = stage.scenario
    submission = scenario.submission(HONEST, 0, units=1000)
    batch_id = await scenario.commit([submission])
    await scenario.post(batch_id, [submission], [fraud(1, submission)])
    changed = RunTerms(2 * 10**12, 200_000, 1_000_000, 3)
    await scenario.of(OWNER).write("RunRegistry", "proposeChange", [1, changed])
    run = await stage.json("run", "show", "1")
    assert run["owner"] == OWNER.address
    assert run["state"] == "open"
    assert [v["stake_wei"] for v in run["validators"]] == [str(500 * TOKEN)] * 3
    assert run["policy"]["version"] == 0
    assert run["workers"] == {"ever": 1, "last_hour": 1}
    assert run["submissions"]["fraud"] == 1
    assert run["funds"]["available_wei"] == str(TOKEN - 1000 * 10**12)
    assert run["funds"]["units"] == 999_000
    assert run["change"]["terms"]["quorum"] == 3
    assert run["documents"]["recipe"] == "0x" + keccak(b"recipe").hex()
    text = (await stage.run("run", "show", "1")).stdout
    assert "for 999,000 units" in text
    assert f"{VALIDATORS[0].address}  500 tokens at stake" in text
    assert "slashes 20 % for a first" in text


async def test_runs_are_listed_and_closed_ones_only_on_demand(stage: Stage) -> None:
    assert [run["run"] for run in await stage.json("run", "list")] == [1]
    assert "1    open" in (await stage.run("run", "list")).stdout
    await stage.scenario.of(OWNER).write("RunRegistry", "closeRun", [1])
    assert await stage.json("run", "list") == []
    assert [run["state"] for run in await stage.json("run", "list", "--all")] == ["closed"]


async def test_an_unknown_run_is_refused_with_the_number_there_are(stage: Stage) -> None:
    error = await stage.error("run", "show", "2")
    assert "there is no run 2, there are 1" in str(error)
    assert "muster run list" in hint(error)


# Money for what an L2 posts on its L1


@pytest.mark.parametrize(
    ("fake", "data"),
    [
        (fee_oracles.OP_STACK, "1.5"),
        (fee_oracles.BEFORE_ISTHMUS, "1"),
        (fee_oracles.ARBITRUM, "1.1"),
    ],
    ids=["op stack", "before isthmus", "arbitrum"],
)
async def test_an_l2s_data_fee_is_part_of_the_gas_money(
    stage: Stage, fake: tuple[str, bytes], data: str
) -> None:
    address, code = fake
    rpc = stage.scenario.rpc
    key = stage.keep("stranger", STRANGER)
    words = ("stake", "--keystore", key, "--amount", "1", "--yes")
    await rpc.call("anvil_setNextBlockBaseFeePerGas", "0x0")
    await rpc.call("evm_mine")
    # Anvil offers a tip of a gwei: what a gas costs.
    assert int(await rpc.call("eth_gasPrice"), 16) == 10**9
    await rpc.call("anvil_setBalance", STRANGER.address, hex(10**18))
    await rpc.call("anvil_setCode", address, hex0x(code))
    error = await stage.error(*words)
    assert f"{float(data) + 0.0003:g}, {data} of it for data on its L1 for gas" in str(error)
    assert "muster devnet fund" in hint(error)
    await rpc.call("anvil_setBalance", STRANGER.address, hex(2 * 10**18))
    assert "holds 0 tokens" in str(await stage.error(*words))


@pytest.mark.parametrize("fake", fee_oracles.OTHERS)
async def test_what_is_no_fee_oracle_changes_nothing(stage: Stage, fake: tuple[str, bytes]) -> None:
    address, code = fake
    chain = stage.scenario.of(OWNER)
    before = await gas_money(chain, "stake")
    assert before.data_wei == 0
    await chain.rpc.call("anvil_setCode", address, hex0x(code))
    assert await gas_money(chain, "stake") == before


async def test_the_data_fee_is_asked_for_in_the_same_request(stage: Stage) -> None:
    chain, asked = stage.scenario.of(OWNER), []
    batch = chain.rpc.try_batch

    async def counting(calls: Any) -> list[Any]:
        asked.append([method for method, _ in calls])
        return await batch(calls)

    chain.rpc.try_batch = counting  # type: ignore[method-assign]
    await gas_money(chain, "dispute")
    assert asked == [["eth_gasPrice", "eth_call", "eth_call", "eth_call"]]


async def test_no_command_signs_more_than_its_data_fee_is_for() -> None:
    sizes = {
        name: taken.zero_bytes + taken.nonzero_bytes + ENVELOPE_BYTES
        for name, taken in read_measured(RESULTS).footprints.items()
    }
    signed = {
        "stake": ["onboard"],
        "unstake": ["request_unbond", "withdraw"],
        "vote": ["commit_vote", "reveal_vote"],
        "dispute": ["approve", "challenge", "draw_jury", "close_case"],
    }
    for command, operations in signed.items():
        assert sum(sizes[each] for each in operations) <= DATA_BYTES[command]
