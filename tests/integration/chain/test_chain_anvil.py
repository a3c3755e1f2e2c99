"""muster.chain against real contracts on a real Anvil."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chain_scenario import (
    ACCEPT,
    CHALLENGER,
    CHEATER,
    EXACT_FRAUD_PPM,
    HONEST,
    ORCHESTRATOR,
    OWNER,
    PARAMETERS,
    PRICE,
    TOKEN,
    VALIDATORS,
    WINDOW_S,
    Scenario,
    fraud,
    network,
    node_of,
    play,
)

from muster.app.anvil import Anvil
from muster.chain import (
    ZERO_ADDRESS,
    Chain,
    SlashState,
    WorkerStatus,
    load_deployment,
    save_deployment,
)
from muster.client.stake import add_stake, consent_of
from muster.deploy import DeployParameters, deploy_contracts
from muster.protocol import errors
from muster.protocol.eip712 import address_of
from muster.protocol.ids import PolicyVersion, RunId, to_address
from muster.protocol.merkle import batch_proof
from muster.protocol.messages import Verdict

STAKE = 100 * TOKEN


@pytest.fixture
async def net() -> AsyncIterator[Scenario]:
    async with network() as network_with_run:
        yield network_with_run


async def ask(chain: Chain, contract: str, function: str, *args: Any) -> Any:
    """Return the single value of a view function that our programs do not use."""
    (value,) = await chain.read(contract, function, args)
    return value


# ------------------------------------------------------------------- deployment


async def test_deployment_is_found_again_when_saved(tmp_path: Path) -> None:
    async with Anvil() as anvil:
        made = await deploy_contracts(
            anvil.rpc_url, Anvil.key(0), DeployParameters(), deployments=tmp_path
        )
        assert load_deployment(tmp_path, 31337) == made
        async with await Chain.connect(anvil.rpc_url, tmp_path) as chain:
            assert chain.deployment == made
            assert chain.account is None


async def test_deployment_has_its_parameters() -> None:
    async with network(with_run=False) as net:
        chain = net.of(OWNER)
        assert await chain.workers.required_stake() == PARAMETERS.required_worker_stake
        assert (
            await ask(chain, "WorkerRegistry", "activationDelay")
            == PARAMETERS.activation_delay_blocks
        )
        assert await ask(chain, "WorkerRegistry", "jailTime") == PARAMETERS.jail_time_s
        assert await chain.runs.required_validator_stake() == PARAMETERS.required_validator_stake
        assert await chain.ledger.challenge_window() == PARAMETERS.challenge_window_s
        assert await chain.ledger.outcome_deadline() == PARAMETERS.outcome_deadline_s
        assert await ask(chain, "JuryPool", "drawTime") == PARAMETERS.vote_commit_s
        court = await chain.court.terms()
        assert (court.bond, court.juror_fee) == (PARAMETERS.bond, PARAMETERS.juror_fee)
        assert await chain.jurors.required_stake() == PARAMETERS.required_juror_stake
        assert await chain.ledger.appeal_time() == PARAMETERS.challenge_window_s
        assert await ask(chain, "ContributionLedger", "judgementTime") == PARAMETERS.judgement_s
        assert await chain.vault.unbonding_period() == PARAMETERS.unbonding_s
        assert await ask(chain, "StakeVault", "insurance") == OWNER.address
        assert await ask(chain, "StakeVault", "insurancePpm") == PARAMETERS.insurance_ppm
        assert await chain.vault.reporter_ppm() == PARAMETERS.reporter_ppm
        assert await chain.vault.reporter_cap() == PARAMETERS.reporter_cap
        assert await chain.token.balance_of(OWNER.address) == PARAMETERS.initial_supply


async def test_domains_are_those_of_the_contracts() -> None:
    async with network(with_run=False) as net:
        chain = net.of(OWNER)
        for contract in ("WorkerRegistry", "ContributionLedger"):
            separator = await ask(chain, contract, "DOMAIN_SEPARATOR")
            assert separator == chain.domain(contract).separator()


# ------------------------------------------------------------------- connecting


async def test_connect_names_the_outage_when_nothing_answers(tmp_path: Path) -> None:
    with pytest.raises(errors.ChainUnreachable, match="does not answer") as error:
        await Chain.connect("http://user:secret@127.0.0.1:9/key", tmp_path)
    assert "secret" not in str(error.value)
    assert "key" not in str(error.value)


async def test_connect_refuses_a_chain_without_the_contracts() -> None:
    async with network(with_run=False) as net, Anvil() as fresh:
        with pytest.raises(
            errors.WrongChain, match="no code at the recorded address of MusterToken"
        ):
            await Chain.connect(fresh.rpc_url, net.deployment)


# ---------------------------------------------------------------------- sending


async def test_sends_from_many_tasks_all_land_when_concurrent() -> None:
    async with network(with_run=False) as net:
        chain = net.of(CHALLENGER)
        receipts = await asyncio.gather(
            *(chain.token.faucet(CHALLENGER.address, 1) for _ in range(25))
        )
        assert len({receipt.tx_hash for receipt in receipts}) == 25
        assert await chain.token.balance_of(CHALLENGER.address) == 25


async def test_revert_is_decoded_before_anything_is_paid() -> None:
    async with network(with_run=False) as net:
        chain = net.of(CHALLENGER)
        before = await chain.rpc.call("eth_getBalance", CHALLENGER.address, "latest")
        with pytest.raises(errors.ContractRevert) as error:
            await chain.vault.deposit(RunId(1), CHALLENGER.address, 7)
        assert error.value.name == "ERC20InsufficientAllowance"
        assert error.value.args_ == (net.deployment.contracts["StakeVault"], 0, 7)
        assert error.value.tx is None
        assert await chain.rpc.call("eth_getBalance", CHALLENGER.address, "latest") == before


async def test_view_revert_is_decoded() -> None:
    async with network(with_run=False) as net:
        with pytest.raises(errors.ContractRevert, match=r"RunUnknown\(9\)"):
            await net.of(OWNER).runs.config_of(9)  # type: ignore[arg-type]


async def test_account_without_gas_money_is_told_so() -> None:
    async with network(with_run=False) as net:
        key = bytes([7]) * 32
        async with await Chain.connect(net.anvil.rpc_url, net.deployment, key=key) as chain:
            assert chain.account is not None
            with pytest.raises(Exception, match=r"(?i)insufficient funds") as error:
                await chain.token.faucet(chain.account, 1)
            assert "gas" in str(getattr(error.value, "hint", ""))
            await net.anvil.set_balance(chain.account, 10**18)
            await chain.token.faucet(chain.account, 1)


# ------------------------------------------------------------------------- flow


async def test_worker_joins_with_permit_in_one_transaction() -> None:
    async with network(with_run=False) as net:
        await net.create_run()
        await net.join(HONEST)
        chain, run_id = net.of(HONEST), net.run_id
        assert await chain.workers.worker_of(HONEST.address) == (1, node_of(HONEST).address)
        assert await chain.workers.worker_of_node(node_of(HONEST).address) == HONEST.address
        member = await chain.workers.member_of(run_id, HONEST.address)
        assert (member.status, member.convictions) == (WorkerStatus.ACTIVE, 0)
        assert await chain.vault.active_stake(run_id, HONEST.address) == STAKE
        view = await net.view()
        seen = view.runs[run_id].members[HONEST.address]
        assert (seen.node, seen.active_from) == (node_of(HONEST).address, member.active_from)
        assert (seen.active_wei, seen.terms) == (STAKE, 1)
        assert view.workers[HONEST.address].registered_tx == seen.joined_tx
        assert view.contradictions == []


async def test_run_is_read_back_as_created(net: Scenario) -> None:
    chain = net.of(OWNER)
    assert await chain.runs.config_of(net.run_id) == net.config()
    run = (await net.view()).runs[net.run_id]
    assert run.config == net.config()
    assert (run.owner, run.funded_wei) == (OWNER.address, 10 * TOKEN)
    assert run.validators == [v.address for v in VALIDATORS]
    assert await chain.runs.terms_of(net.run_id) == (net.config().terms, 1)
    seat = net.run_id, VALIDATORS[1].address
    assert await ask(chain, "RunRegistry", "seatBitOf", *seat) == 0b10
    admission = await chain.read("RunRegistry", "admissionOf", [net.run_id])
    assert admission == (ORCHESTRATOR.address, True, 1, PRICE)
    assert await chain.runs.latest_version(net.run_id) == 0
    assert await ask(chain, "RewardEscrow", "fundsOf", net.run_id) == (10 * TOKEN, 0)


async def test_beacon_is_the_hash_of_the_publishing_block(net: Scenario) -> None:
    view = await net.view()
    checkpoint = view.runs[net.run_id].checkpoints[PolicyVersion(0)]
    stored = await net.of(OWNER).runs.checkpoint_of(net.run_id, PolicyVersion(0))
    block = await net.rpc.call("eth_getBlockByNumber", hex(stored.block_number), False)
    assert "0x" + checkpoint.beacon.hex() == block["hash"]
    assert checkpoint.manifest_root == stored.manifest_root
    assert view.contradictions == []


async def test_full_flow_slashes_the_cheater_and_pays_the_honest(net: Scenario) -> None:
    await play(net)
    view = await net.view()
    assert view.contradictions == []
    members = view.runs[net.run_id].members
    honest, cheater = members[HONEST.address], members[CHEATER.address]
    assert (honest.status, cheater.status) == (WorkerStatus.ACTIVE, WorkerStatus.BANNED)
    taken = STAKE * EXACT_FRAUD_PPM // 10**6
    assert (cheater.active_wei, cheater.slashed_wei) == (STAKE - taken, taken)
    (slash,) = view.slashes
    assert (slash.owner, slash.batch_id, slash.position) == (CHEATER.address, 1, 1)
    assert slash.state is SlashState.RELEASED
    (payment,) = view.payments
    assert (payment.worker, payment.slots, payment.units) == (HONEST.address, 2, 1300)
    assert payment.amount_wei == 1300 * PRICE
    assert await net.of(HONEST).token.balance_of(HONEST.address) == 1300 * PRICE
    stream = view.training_stream(net.run_id)
    assert [(i.batch_id, i.position) for i in stream] == [(1, 0), (1, 2), (2, 0)]
    records = [record for batch in view.runs[net.run_id].judged for record in batch.records or ()]
    slots = {(record.worker_id, record.step, record.index) for record in records}
    assert (2, 1, 0) in slots
    assert (2, 1, 1) not in slots


async def test_views_agree_with_the_ledger(net: Scenario) -> None:
    await play(net)
    view, chain = await net.view(), net.of(OWNER)
    assert await chain.ledger.batch_count() == 2
    for batch in view.batches.values():
        stored = await ask(chain, "ContributionLedger", "commitmentOf", batch.batch_id)
        assert stored == batch.header().commitment()
        assert not await ask(chain, "ContributionLedger", "isDisputed", batch.header())
    records = view.batches[1].records
    assert records is not None
    proof = await net.proof(1, 0)
    standing = await chain.ledger.standing_of(proof)
    assert (standing.outcome, standing.verdict) == (records[0], Verdict.ACCEPTED)
    assert (standing.leaf, standing.is_final) == (records[0].leaf(1, 0), True)
    assert view.batches[1].signers == 0b11
    assert await net.of(OWNER).escrow.is_paid(net.run_id, HONEST.address, records[0].step, 0)


async def test_overturned_fraud_gives_stake_and_status_back(net: Scenario) -> None:
    submission = net.submission(CHEATER, 0)
    records = [fraud(2, submission)]
    batch_id = await net.commit([submission])
    await net.post(batch_id, [submission], records)
    proof = await net.proof(batch_id, 0)
    await net.of(ORCHESTRATOR).ledger.execute_fraud(proof, net.held(proof, submission, CHEATER))
    case_id = await net.dispute(proof, submission, CHEATER, ACCEPT)
    view, chain = await net.view(), net.of(OWNER)
    assert view.contradictions == []
    member = view.runs[net.run_id].members[CHEATER.address]
    assert (member.status, member.active_wei, member.slashed_wei) == ("Active", STAKE, 0)
    assert view.slashes[0].state is SlashState.RESTORED
    assert view.standing_verdict(batch_id, 0) is Verdict.ACCEPTED
    assert case_id == records[0].leaf(batch_id, 0)
    case = view.cases[case_id]
    assert (case.overturned, case.ruling) == (True, ACCEPT.number)
    assert (case.reporter, len(case.votes)) == (CHALLENGER.address, PARAMETERS.jury_size)
    standing = await chain.ledger.standing_of(proof)
    assert (standing.outcome, standing.verdict) == (records[0], Verdict.ACCEPTED)


async def test_a_header_of_before_a_split_is_that_of_now_less_what_was_split_off(
    net: Scenario,
) -> None:
    works = [net.submission(HONEST, 0), net.submission(CHEATER, 0, units=500)]
    batch_id = await net.commit(works)
    await net.pass_time(PARAMETERS.outcome_deadline_s)
    chain, before = net.of(CHEATER), await net.view()
    batch, read_to = before.batches[batch_id], before.block_number or 0
    assert await chain.units_split_off(batch_id, after=read_to) == 0
    await net.split_off(batch_id, works, 0, HONEST)
    assert await chain.units_split_off(batch_id, after=read_to) == works[0].units
    assert await chain.units_split_off(batch_id + 1, after=read_to) == 0
    await net.put_up_bond(CHEATER)
    held = await net.work(works[1], CHEATER), 1, batch_proof([w.leaf() for w in works], 1), []
    stale = batch.header()
    with pytest.raises(errors.ContractRevert, match="LedgerBatchMismatch"):
        await chain.ledger.split_off(stale, *held)
    await chain.ledger.split_off(replace(stale, units=stale.units - works[0].units), *held)
    assert (await net.view()).batches[batch_id].units == 0


async def test_work_that_its_run_left_unjudged_is_judged_by_the_network(net: Scenario) -> None:
    works = [net.submission(HONEST, 0), net.submission(CHEATER, 0, units=500)]
    batch_id = await net.commit(works)
    direct = await net.submit_direct(net.submission(HONEST, 1), HONEST)
    with pytest.raises(errors.ContractRevert, match="LedgerWrongTime"):
        await net.summon(direct, net.submission(HONEST, 1), HONEST)
    await net.pass_time(PARAMETERS.outcome_deadline_s)
    own = await net.split_off(batch_id, works, 0, HONEST)
    case_id = await net.summon(own, works[0], HONEST)
    await net.vote(case_id, dict.fromkeys(await net.draw(case_id), ACCEPT))
    header = (await net.view()).batches[own].header()
    court = net.of(OWNER).court
    await court.settle_summoned(header, works[0])
    await net.pass_time(WINDOW_S)
    ledger = net.of(OWNER).ledger
    for unjudged in (batch_id, direct):
        await ledger.void_batch((await net.view()).batches[unjudged].header())
    view = await net.view()
    assert view.contradictions == []
    assert {n: b.is_void for n, b in view.batches.items()} == {
        batch_id: True,
        direct: True,
        own: False,
    }
    assert (view.batches[own].split_from, view.batches[batch_id].units) == (batch_id, 500)
    for batch in view.batches.values():
        stored = await ask(net.of(OWNER), "ContributionLedger", "commitmentOf", batch.batch_id)
        assert (stored == batch.header().commitment()) is not batch.is_void
    assert view.standing_verdict(own, 0) is Verdict.ACCEPTED
    await net.of(HONEST).escrow.claim([view.batches[own].claim([0])])
    run = (await net.view()).runs[net.run_id]
    assert (run.paid_wei, run.reserved_wei) == (1000 * PRICE, 0)
    assert run.court_wei == PARAMETERS.jury_size * PARAMETERS.juror_fee
    funds = await ask(net.of(OWNER), "RewardEscrow", "fundsOf", net.run_id)
    assert funds == (run.available_wei, 0)


async def test_quorum_may_say_that_nothing_of_a_batch_can_be_had(net: Scenario) -> None:
    works = [net.submission(HONEST, 0)]
    batch_id = await net.commit(works)
    await net.post(batch_id, works, [])
    batch = (await net.view()).batches[batch_id]
    assert batch.header().status == "Withheld"
    stored = await ask(net.of(OWNER), "ContributionLedger", "commitmentOf", batch_id)
    assert stored == batch.header().commitment()
    ledger = net.of(OWNER).ledger
    with pytest.raises(errors.ContractRevert, match="LedgerWrongTime"):
        await ledger.void_batch(batch.header())
    await net.pass_time(WINDOW_S)
    await ledger.void_batch(batch.header())
    view = await net.view()
    assert view.batches[batch_id].is_void
    assert view.contradictions == []


async def test_life_of_a_worker_is_followed_from_jail_to_exit(net: Scenario) -> None:
    chain, run_id = net.of(HONEST), net.run_id
    await chain.vault.request_unbond(run_id, 1)
    assert (await net.view()).runs[run_id].members[HONEST.address].status == "Jailed"
    await chain.token.faucet(HONEST.address, 1)
    await add_stake(chain, run_id, HONEST.address, 1)
    await net.pass_time(PARAMETERS.jail_time_s)
    await chain.workers.come_back(run_id, 1)
    assert (await net.view()).runs[run_id].members[HONEST.address].status == "Active"
    await chain.workers.exit(run_id)
    await net.pass_time(PARAMETERS.unbonding_s)
    await chain.vault.withdraw(run_id)
    view = await net.view()
    member = view.runs[run_id].members[HONEST.address]
    assert (member.status, member.active_wei, member.unbonding_wei) == ("Exiting", 0, 0)
    assert view.contradictions == []
    assert [status for _, status in member.standings] == [
        *("Active", "Jailed", "Active", "Exiting")
    ]


async def test_worker_rotates_its_node_in_all_its_runs(net: Scenario) -> None:
    chain, workers = net.of(HONEST), net.of(HONEST).workers
    first, second = node_of(HONEST), node_of(OWNER)
    deadline = await chain.now() + 60
    consent = await consent_of(chain, HONEST.address, second.wallet, deadline)
    await workers.rotate_node(consent)
    assert await workers.worker_of_node(first.address) == ZERO_ADDRESS
    assert await workers.worker_by_id(1) == HONEST.address
    assert await workers.nonces(HONEST.address) == 2
    await net.of(OWNER).write("WorkerRegistry", "jailForLowStake", [net.run_id, HONEST.address])
    assert await ask(chain, "WorkerRegistry", "isActive", net.run_id, HONEST.address)
    view = await net.view()
    assert view.worker_by_node[second.address].address == HONEST.address
    assert first.address not in view.worker_by_node
    member = view.runs[net.run_id].members[HONEST.address]
    assert (member.node, member.node_at(member.joined_block)) == (second.address, first.address)


async def test_run_is_paused_and_its_validators_change(net: Scenario) -> None:
    chain, old = net.of(OWNER), VALIDATORS[0].address
    await chain.write("RunRegistry", "setSubmissionsPaused", [net.run_id, True])
    admission = await chain.read("RunRegistry", "admissionOf", [net.run_id])
    assert admission == (ORCHESTRATOR.address, False, 1, PRICE)
    with pytest.raises(errors.ContractRevert, match="LedgerPaused"):
        await net.commit([net.submission(HONEST, 0)])
    with pytest.raises(errors.ContractRevert, match="RunInvalidValidator"):
        await net.sit(CHALLENGER)
    await chain.runs.invite(net.run_id, CHALLENGER.address, True)
    await net.sit(CHALLENGER)
    await chain.runs.dismiss(net.run_id, old)
    assert not await chain.runs.is_validator(net.run_id, old)
    seated = (*VALIDATORS[1:], CHALLENGER)
    accounts, bits = await chain.read("RunRegistry", "validatorsOf", [net.run_id])
    seats = dict(zip(accounts, bits, strict=True))
    assert seats == dict(zip((v.address for v in seated), (0b10, 0b100, 0b1000), strict=True))
    assert await ask(chain, "RunRegistry", "ownerOf", net.run_id) == OWNER.address
    assert await chain.runs.run_count() == 1
    view = await net.view()
    run = view.runs[net.run_id]
    assert run.paused
    assert set(run.validators) == set(seats)
    assert view.contradictions == []
    # A dismissed validator's stake is its own.
    assert view.stake(net.run_id, old).active_wei == PARAMETERS.required_validator_stake


# ------------------------------------------------------------------------ anvil


async def test_anvil_refuses_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.ConfigError, match=f"port {port} is in use"):
            await Anvil(port=port).__aenter__()


async def test_anvil_says_so_when_its_state_file_is_damaged(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text("{")
    with pytest.raises(errors.ConfigError, match="anvil ended"):
        await Anvil(state=state, log=tmp_path / "anvil.log").__aenter__()


async def test_anvil_keeps_its_chain_between_two_starts(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    async with Anvil(state=state) as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, OWNER.key, PARAMETERS)
        save_deployment(tmp_path, deployment)
    async with Anvil(state=state) as anvil, await Chain.connect(anvil.rpc_url, tmp_path) as chain:
        assert await ask(chain, "MusterToken", "symbol") == "MUSTER"


async def test_anvil_leaves_no_process_behind() -> None:
    async with Anvil() as anvil:
        pid = anvil.pid
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


async def test_development_accounts_are_the_well_known_ones() -> None:
    async with Anvil() as anvil, await _bare(anvil) as chain:
        accounts = await chain.rpc.call("eth_accounts")
    assert [to_address(a) for a in accounts] == [address_of(Anvil.key(i)) for i in range(10)]


async def _bare(anvil: Anvil) -> Chain:
    deployment = await deploy_contracts(anvil.rpc_url, Anvil.key(0), PARAMETERS)
    return await Chain.connect(anvil.rpc_url, deployment)
