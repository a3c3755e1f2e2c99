"""Stake, leave, come back, change the node: at the command line, on the real contracts."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fee_oracles
import pytest
import pytest_asyncio
from chain_scenario import (
    ACCEPT,
    CHEATER,
    HONEST,
    JURORS,
    OWNER,
    PARAMETERS,
    TOKEN,
    VALIDATORS,
    Person,
    fraud,
    node_of,
    rejected,
)
from journey_stage import PASSWORD, Stage, hint, open_stage, undone

from muster.chain import Chain, RunTerms, WorkerStatus
from muster.client.preflight import GAS_AND_BYTES, gas_money
from muster.client.stake import join_run
from muster.lab.economics.chain_costs import RESULTS, read_measured
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ChainUnreachable, ConfigError, NotYet
from muster.protocol.ids import RunId
from muster.wallet import Wallet, keystore_address

STRANGER = Person(keccak(b"a stranger"))
RUN_ID, RUN = RunId(1), ("--run", "1")
ENVELOPE_BYTES = 120
"""Bytes of a signed transaction beside its calldata."""


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
    member = await stage.scenario.of(OWNER).workers.member_of(RUN_ID, worker.address)
    return member.status


# Sent, and then


async def test_hash_is_printed_though_the_chain_does_not_answer_afterwards(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> str:
        raise ChainUnreachable("no answer")

    monkeypatch.setattr("muster.client.cli.stake.what_next", fail)
    await stage.scenario.of(HONEST).token.faucet(HONEST.address, 5 * TOKEN)
    words = ("--keystore", stage.key("worker"), "--amount", "5", "--yes")
    result = await stage.run("stake", *RUN, *words)
    assert isinstance(result.exception, ChainUnreachable)
    tx_hash = result.stdout.strip()
    assert len(tx_hash) == 66
    assert f"sent {tx_hash}, waiting\n" in result.stderr


async def test_command_that_was_interrupted_is_not_paid_for_twice(stage: Stage) -> None:
    rpc, vault = stage.scenario.rpc, stage.scenario.of(HONEST).vault
    await rpc.call("evm_setIntervalMining", 100_000)
    words = ("unstake", *RUN, "--keystore", stage.key("worker"), "--amount", "5", "--yes")
    flags = ("--rpc", stage.scenario.anvil.rpc_url, "--deployments", str(stage.folder))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from muster.app.cli import main; main()", *words, *flags),
        env={**os.environ, "MUSTER_PASSWORD": PASSWORD},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    line = b""
    while not line.startswith(b"sent 0x"):
        line = await process.stderr.readline()
        assert line
    process.send_signal(signal.SIGINT)
    _, shown = await process.communicate()
    tx_hash = line.split()[1].rstrip(b",").decode()
    assert process.returncode == 130
    assert f"hint: look for {tx_hash} on chain before".encode() in shown
    again = await stage.error(*words)
    assert isinstance(again, ConfigError)
    assert f"{HONEST.address} has sent 1 transactions that are not mined yet" in str(again)
    await rpc.call("evm_mine")
    await rpc.call("evm_setAutomine", True)
    assert (await vault.account_of(RUN_ID, HONEST.address)).unbonding_wei == 5 * TOKEN
    await stage.json(*words)
    assert (await vault.account_of(RUN_ID, HONEST.address)).unbonding_wei == 10 * TOKEN


# Leave


async def test_leaving_unbonds_all_and_pays_out_when_it_is_due(stage: Stage) -> None:
    leave = ("unstake", *RUN, "--keystore", stage.key("worker"), "--yes")
    asked = await stage.json(*leave)
    assert (asked["action"], asked["amount_tokens"]) == ("unbonding", "100")
    assert asked["amount_wei"] == str(100 * TOKEN)
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
    result = await stage.run("unstake", *RUN, "--keystore", stage.key("worker"), run_input="n\n")
    assert result.exit_code == 1
    assert "unbonds  100 of 100 tokens" in result.stderr
    assert "in 3 min 20 s" in result.stderr
    assert "worker   leaves this run: no more tickets of it" in result.stderr
    assert result.stderr.count("Go on?") == 1
    assert await status_of(stage) is WorkerStatus.ACTIVE


async def test_spare_stake_leaves_and_the_worker_stays(stage: Stage) -> None:
    chain = stage.scenario.of(HONEST)
    await chain.token.faucet(HONEST.address, 5 * TOKEN)
    await stage.json("stake", *RUN, "--keystore", stage.key("worker"), "--amount", "5", "--yes")
    words = ("unstake", *RUN, "--keystore", stage.key("worker"), "--amount", "5", "--yes")
    assert (await stage.json(*words))["amount_tokens"] == "5"
    assert await status_of(stage) is WorkerStatus.ACTIVE
    assert await chain.vault.active_stake(RUN_ID, HONEST.address) == 100 * TOKEN


async def test_too_little_left_jails_and_is_said_before(stage: Stage) -> None:
    words = ("unstake", *RUN, "--keystore", stage.key("worker"), "--amount", "1")
    result = await stage.run(*words, run_input="y\n")
    assert "is jailed: it must hold 100 tokens" in result.stderr
    assert await status_of(stage) is WorkerStatus.JAILED


async def test_more_than_is_staked_is_refused(stage: Stage) -> None:
    error = await stage.error("unstake", *RUN, "--keystore", stage.key("worker"), "--amount", "101")
    assert "--amount is 101 tokens, only 100 are staked for run 1" in str(error)


async def test_asking_for_the_rest_moves_the_date_of_all(stage: Stage) -> None:
    words = ("unstake", *RUN, "--keystore", stage.key("worker"), "--yes")
    first = await stage.json(*words, "--amount", "1")
    await stage.scenario.pass_time(50)
    rest = await stage.run(*words, "--all", "--json")
    assert "1 tokens that unbond already wait until then too" in rest.stderr
    account = await stage.scenario.of(HONEST).vault.account_of(RUN_ID, HONEST.address)
    assert account.withdrawable_at > first["due_at"]
    assert account.unbonding_wei == 100 * TOKEN


async def test_an_open_case_holds_nothing_back(stage: Stage) -> None:
    scenario = stage.scenario
    submission = scenario.submission(CHEATER, 0)
    batch_id = await scenario.commit([submission])
    await scenario.post(batch_id, [submission], [rejected(2, submission)])
    await scenario.claim(await scenario.proof(batch_id, 0), submission, CHEATER, ACCEPT)
    words = ("unstake", *RUN, "--keystore", stage.key("cheater"), "--yes")
    await stage.json(*words)
    await scenario.pass_time(PARAMETERS.unbonding_s)
    assert [case.closed for case in (await scenario.view()).cases.values()] == [False]
    assert (await stage.json(*words))["action"] == "withdrawn"


async def test_a_validators_seat_is_pointed_out(stage: Stage) -> None:
    words = ("unstake", *RUN, "--keystore", stage.key("validator"))
    some = await stage.run(*words, "--amount", "1", run_input="n\n")
    assert "seat     is lost: it must hold 500 tokens" in some.stderr
    everything = await stage.run(*words, run_input="n\n")
    assert "seat     is given up" in everything.stderr


async def test_stake_of_the_bench_leaves_with_the_juror(stage: Stage) -> None:
    key = stage.keep("juror", JURORS[0])
    words = ("unstake", "--run", "0", "--keystore", key, "--yes")
    early = await stage.error(*words)
    assert "is on the bench" in str(early)
    assert "muster juror leave" in hint(early)
    left = await stage.run("juror", "leave", "--keystore", key, "--yes")
    assert left.exception is None, left.output
    assert "unbonds 500 tokens" in left.stderr
    assert "until then its absence from a case can still be slashed" in left.stderr
    assert "signatures" not in left.stderr
    assert "can be withdrawn from" in str(await stage.error(*words))
    await stage.scenario.pass_time(PARAMETERS.unbonding_s)
    assert (await stage.json(*words))["amount_tokens"] == "500"


async def test_stake_of_one_run_stays_when_another_is_left(stage: Stage) -> None:
    scenario, chain = stage.scenario, stage.scenario.of(HONEST)
    second, _ = await scenario.of(OWNER).runs.create_run(scenario.config())
    await chain.token.faucet(HONEST.address, 100 * TOKEN)
    join = ("stake", "--run", str(second), "--keystore", stage.key("worker"), "--yes")
    assert (await stage.json(*join))["amount_tokens"] == "100"
    await stage.json("unstake", *RUN, "--keystore", stage.key("worker"), "--yes")
    assert await status_of(stage) is WorkerStatus.EXITING
    member = await chain.workers.member_of(second, HONEST.address)
    assert member.status is WorkerStatus.ACTIVE
    assert await chain.vault.active_stake(second, HONEST.address) == 100 * TOKEN


# Come back


async def test_a_jailed_worker_comes_back_after_its_time_and_stake(stage: Stage) -> None:
    await stage.json("unstake", *RUN, "--keystore", stage.key("worker"), "--amount", "1", "--yes")
    back = ("worker", "rejoin", *RUN, "--keystore", stage.key("worker"), "--yes")
    assert isinstance(await stage.error(*back), NotYet)
    await stage.scenario.pass_time(PARAMETERS.jail_time_s)
    short = await stage.error(*back)
    assert "stakes 99 tokens in run 1, a worker must hold 100" in str(short)
    assert "--amount 1" in hint(short)
    await stage.scenario.of(HONEST).token.faucet(HONEST.address, TOKEN)
    await stage.json("stake", *RUN, "--keystore", stage.key("worker"), "--amount", "1", "--yes")
    assert (await stage.json(*back))["active_from_block"] > 0
    assert await status_of(stage) is WorkerStatus.ACTIVE
    assert "is active" in str(await stage.error(*back))


async def test_a_leaving_worker_comes_back_with_fresh_stake(stage: Stage) -> None:
    await stage.json("unstake", *RUN, "--keystore", stage.key("worker"), "--yes")
    shown = await stage.json("worker", "status", *RUN, "--worker", HONEST.address)
    add = "muster stake --run 1 --keystore FILE --amount 100"
    assert f"it is leaving: {add}, then muster worker rejoin" in shown["no_work_because"][0]
    await stage.scenario.of(HONEST).token.faucet(HONEST.address, 100 * TOKEN)
    await stage.json("stake", *RUN, "--keystore", stage.key("worker"), "--amount", "100", "--yes")
    again = ("worker", "rejoin", *RUN, "--keystore", stage.key("worker"))
    refused = await stage.run(*again)  # nobody says yes
    risk = "risk    at most these 200 tokens (100 of them unbond), to this run only"
    assert risk in refused.stderr
    assert await status_of(stage) is WorkerStatus.EXITING
    await stage.json(*again, "--yes")
    assert await status_of(stage) is WorkerStatus.ACTIVE


async def test_a_banned_worker_does_not_come_back(stage: Stage) -> None:
    scenario = stage.scenario
    submission = scenario.submission(CHEATER, 0)
    batch_id = await scenario.commit([submission])
    await scenario.post(batch_id, [submission], [fraud(2, submission)])
    proof = await scenario.proof(batch_id, 0)
    await scenario.of(OWNER).ledger.execute_fraud(proof, scenario.held(proof, submission, CHEATER))
    error = await stage.error("worker", "rejoin", *RUN, "--keystore", stage.key("cheater"))
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
    assert (await workers.worker_of(HONEST.address))[1] == changed["node"]
    again = (*words[:-1], stage.key("node"))
    assert "RegistryNodeTaken" in str(await stage.error(*again, "--yes"))


async def test_rotation_to_the_cold_key_is_refused(stage: Stage) -> None:
    words = ("node", "rotate", "--keystore", stage.key("worker"), "--node", stage.key("worker"))
    assert "belongs on no working machine" in str(await stage.error(*words, "--yes"))


async def test_who_became_its_own_node_gets_another_and_its_stake_back(stage: Stage) -> None:
    key, me = stage.keep("stranger", STRANGER), Wallet(STRANGER.address, STRANGER.key)
    await stage.scenario.anvil.set_balance(me.address, TOKEN)
    await stage.scenario.of(OWNER).token.faucet(me.address, 100 * TOKEN)
    url, deployment = stage.scenario.anvil.rpc_url, stage.scenario.deployment
    async with await Chain.connect(url, deployment, key=me.key) as chain:
        await join_run(chain, me, me, RUN_ID, 100 * TOKEN)
    rotate = ("node", "rotate", "--keystore", key, "--node", stage.key("n"), "--light", "--yes")
    assert (await stage.json(*rotate))["old_node"] == me.address
    left = await stage.json("unstake", *RUN, "--keystore", key, "--yes")
    assert left["amount_tokens"] == "100"


async def test_rotation_of_who_left_every_run_is_possible(stage: Stage) -> None:
    """Its node key still counts for what it signed, and can still be stolen."""
    await stage.json("unstake", *RUN, "--keystore", stage.key("worker"), "--yes")
    words = ("node", "rotate", "--keystore", stage.key("worker"), "--node", stage.key("n"))
    assert (await stage.json(*words, "--light", "--yes"))["old_node"] == node_of(HONEST).address


# What comes next


async def test_staking_says_what_comes_next(stage: Stage) -> None:
    words = ("stake", *RUN, "--keystore", stage.key("worker"), "--amount", "5", "--yes", "--faucet")
    worker = await stage.run(*words)
    assert worker.stdout.startswith("0x")
    assert len(worker.stdout.split()) == 1
    assert f"staked  105 tokens for run 1 are {HONEST.address}'s now; worker 1" in worker.stderr
    assert "active now" in worker.stderr
    assert "muster worker run --run 1 --keystore NODE.json" in worker.stderr
    assert f"muster worker status --run 1 --worker {HONEST.address}" in worker.stderr
    words = ("stake", *RUN, "--keystore", stage.key("validator"), "--amount", "5", "--yes")
    validator = await stage.run(*words, "--faucet")
    assert validator.exception is None, validator.output
    assert "staked  505 tokens" in validator.stderr
    assert "muster worker run" not in validator.stderr


# Bad input


@pytest.mark.parametrize(
    "words",
    [
        ("stake", "--yes", *RUN),
        ("unstake", "--yes", *RUN),
        ("worker", "rejoin", *RUN),
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
    error = await stage.error("stake", *RUN, "--keystore", key, "--amount", "1", "--yes")
    assert "holds 0 of the chain's coin, muster stake may take" in str(error)
    assert "muster devnet fund" in hint(error)


async def test_the_faucet_gives_tokens_and_gas_money(stage: Stage) -> None:
    key = stage.keep("stranger", STRANGER)
    words = ("stake", *RUN, "--keystore", key, "--node", stage.keep("n", node_of(STRANGER)))
    assert "holds 0 of the chain's coin" in str(await stage.error(*words, "--yes"))
    staked = await stage.json(*words, "--amount", "107", "--yes", "--faucet")
    assert (staked["amount_tokens"], staked["amount_wei"]) == ("107", str(107 * TOKEN))
    assert await status_of(stage, STRANGER) is WorkerStatus.ACTIVE


async def test_who_joins_with_too_little_or_without_a_node_is_told_so(stage: Stage) -> None:
    key = stage.keep("stranger", STRANGER)
    words = ("stake", *RUN, "--keystore", key, "--faucet", "--yes")
    nobody = await stage.error(*words)
    assert "has no node yet: nothing could sign its work" in str(nobody)
    assert "--node FILE" in hint(nobody)
    node = ("--node", stage.keep("n", node_of(STRANGER)))
    little = await stage.error(*words, *node, "--amount", "7")
    assert "7 tokens are too few to join: 100 are missing" in str(little)
    assert await status_of(stage, STRANGER) is WorkerStatus.NONE


async def test_a_member_names_no_node_and_adds_something(stage: Stage) -> None:
    words = ("stake", *RUN, "--keystore", stage.key("worker"), "--yes")
    bound = await stage.error(*words, "--node", stage.key("node"))
    assert "is in run 1 already, and keeps its node" in str(bound)
    assert "100 tokens are staked for run 1 already" in str(await stage.error(*words))


async def test_nobody_joins_while_the_terms_are_about_to_change(stage: Stage) -> None:
    changed = RunTerms(2 * 10**12, 200_000, 1_000_000, 3)
    await stage.scenario.of(OWNER).runs.propose_change(RUN_ID, changed)
    key = stage.keep("stranger", STRANGER)
    node = stage.keep("n", node_of(STRANGER))
    words = ("stake", *RUN, "--keystore", key, "--node", node, "--faucet", "--yes")
    assert "the terms of run 1 are about to change" in str(await stage.error(*words))
    await stage.scenario.of(OWNER).runs.cancel_change(RUN_ID)
    assert (await stage.json(*words))["amount_tokens"] == "100"


async def test_too_few_tokens_are_named_with_what_is_needed(stage: Stage) -> None:
    await stage.scenario.rpc.call("anvil_setBalance", STRANGER.address, hex(10**18))
    key, node = stage.keep("stranger", STRANGER), stage.keep("n", node_of(STRANGER))
    error = await stage.error("stake", *RUN, "--keystore", key, "--node", node)
    assert "holds 0 tokens, staking takes 100" in str(error)


async def test_an_unregistered_account_has_nothing_to_come_back_to(stage: Stage) -> None:
    key = stage.keep("stranger", STRANGER)
    await stage.scenario.rpc.call("anvil_setBalance", STRANGER.address, hex(10**18))
    error = await stage.error("worker", "rejoin", *RUN, "--keystore", key)
    assert "is no worker of any run" in str(error)
    assert "muster stake" in hint(error)


# Look at runs


async def test_stake_says_what_the_run_slashes(stage: Stage) -> None:
    words = ("stake", "--keystore", stage.key("worker"), "--amount", "1", *RUN)
    await stage.scenario.of(HONEST).token.faucet(HONEST.address, TOKEN)
    result = await stage.run(*words, run_input="n\n")
    assert "signs   more stake for run 1" in result.stderr
    assert "risk    at most these 101 tokens, to this run only: 10 % for a first" in result.stderr
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
    assert run["workers"] == {"joined": 2, "ever": 1, "last_hour": 1}
    assert run["submissions"]["fraud"] == 1
    assert run["funds"]["available_wei"] == str(10 * TOKEN - 1000 * 10**12)
    assert run["funds"]["units"] == 9_999_000
    assert run["change"]["terms"]["quorum"] == 3
    assert run["documents"]["recipe"] == "0x" + keccak(b"recipe").hex()
    text = (await stage.run("run", "show", "1")).stdout
    assert "for 9,999,000 units" in text
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


# Money for the data that an L2 posts on its L1


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
    node = stage.keep("n", node_of(STRANGER))
    words = ("stake", *RUN, "--keystore", key, "--node", node, "--yes")
    await rpc.call("anvil_setNextBlockBaseFeePerGas", "0x0")
    await rpc.call("evm_mine")
    # Anvil suggests a tip of a gwei, which is the price of gas here.
    assert int(await rpc.call("eth_gasPrice"), 16) == 10**9
    await rpc.call("anvil_setBalance", STRANGER.address, hex(10**18))
    await rpc.call("anvil_setCode", address, hex0x(code))
    error = await stage.error(*words)
    assert f"{float(data) + 0.00032:g}, {data} of it for data on its L1 for gas" in str(error)
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
        "dispute": ["approve", "announce", "claim_case", "settle_case"],
        "validator join": ["approve", "take_seat"],
        "juror join": ["approve", "join_bench"],
    }
    for command, operations in signed.items():
        assert sum(sizes[each] for each in operations) <= GAS_AND_BYTES[command][1]
