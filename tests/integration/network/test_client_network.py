"""Whole clients among real services: honest work is paid, fraud slashed, restarts survived."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from client_network import PRICE, TOKEN, V0, WORKERS, Network, eventually, open_network, running

from muster.app.demo.adversary import ForgedReward
from muster.chain import Chain, WorkerStatus
from muster.client.cli.keys import rotate_node, wallet
from muster.client.cli.stake import stake
from muster.client.cli.worker import rewards
from muster.client.rewards import claim, describe_earnings, find_earnings
from muster.client.worker.loop import WorkerLoop
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Hash32, PolicyVersion, to_address
from muster.protocol.messages import Reason, Verdict
from muster.wallet import Wallet


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with open_network(tmp_path) as opened:
        yield opened


async def accepted(network: Network, number: int) -> int:
    view = await network.view()
    worker_id = view.workers[WORKERS[number].address].worker_id
    stream = view.training_stream(network.run_id)
    return sum(item.record.worker_id == worker_id for item in stream)


async def test_honest_work_is_accepted_recorded_and_paid(network: Network) -> None:
    worker = WORKERS[0].address
    async with running(network.worker(0), network.validator(0), network.validator(1)):

        async def has_three() -> bool:
            return await accepted(network, 0) >= 3

        await eventually(has_three)
    view = await network.view()
    assert view.contradictions == []
    earnings = await find_earnings(network.owner, view, network.run_id, worker)

    async def is_final() -> bool:
        nonlocal earnings
        earnings = await find_earnings(network.owner, view, network.run_id, worker)
        return not earnings.pending

    await eventually(is_final)
    before = await network.owner.token.balance_of(worker)
    last = replace(earnings, claimable=earnings.claimable[-1:])
    assert len(await claim(network.owner, last)) == 1  # anyone may claim for a worker
    assert await claim(network.owner, last) == []
    parts = -(-(len(earnings.claimable) - 1) // 2)
    receipts = await claim(network.owner, earnings, size=2)
    assert len(receipts) == parts
    told = describe_earnings(earnings, worker, receipts)
    assert told["claimed_slots"] == len(earnings.claimable) - 1 == told["paid_slots"] - 1
    rest = earnings.amount_wei(earnings.claimable[:-1])
    assert told["claimed_wei"] == str(rest)
    paid = await network.owner.token.balance_of(worker) - before
    assert paid == earnings.amount_wei(earnings.claimable) > 3 * PRICE
    after = await find_earnings(network.owner, view, network.run_id, worker)
    assert (after.claimable, len(after.paid)) == ((), len(earnings.claimable))


async def test_forger_is_slashed_and_stops_while_the_honest_go_on(network: Network) -> None:
    clients = (network.worker(1, ForgedReward), network.worker(0))
    async with running(*clients, network.validator(0), network.validator(1)) as tasks:
        with pytest.raises(MusterError, match="banned"):
            async with asyncio.timeout(180):
                await tasks[0]
        done = await accepted(network, 0)

        async def goes_on() -> bool:
            return await accepted(network, 0) > done + 1

        await eventually(goes_on)
    view = await network.view()
    cheater = view.member(network.run_id, WORKERS[1].address)
    assert cheater is not None
    assert cheater.status is WorkerStatus.BANNED
    assert cheater.slashed_wei >= 50 * TOKEN
    records = [r for b in view.batches.values() for r in b.records or ()]
    reasons = {r.reason for r in records if r.worker_id == cheater.worker_id}
    assert Reason.WRONG_REWARD in reasons
    honest = [r.verdict for r in records if r.worker_id != cheater.worker_id]
    assert set(honest) == {Verdict.ACCEPTED}


async def test_clients_follow_a_new_policy_and_survive_restarts(network: Network) -> None:
    for version in (V0, PolicyVersion(1)):
        if version:
            await network.publish(version)
        async with running(network.worker(0), network.validator(0), network.validator(1)):

            async def has_more(wanted: PolicyVersion = version) -> bool:
                stream = (await network.view()).training_stream(network.run_id)
                return sum(item.record.policy_version == wanted for item in stream) >= 2

            await eventually(has_more)
    view = await network.view()
    assert all(
        r.verdict is Verdict.ACCEPTED for b in view.batches.values() for r in b.records or ()
    )
    assert view.contradictions == []


async def test_work_goes_on_with_the_version_at_hand_while_the_next_one_is_fetched(
    network: Network,
) -> None:
    arrived = asyncio.Event()

    class Slow(WorkerLoop):
        async def _fetched(self, version: PolicyVersion, root: Hash32) -> Path:
            if version != V0:
                await arrived.wait()
            return await super()._fetched(version, root)

        def version_at_hand(self) -> PolicyVersion | None:
            # Until this node sees the new version it asks for the newest, and may be given it.
            return super().version_at_hand() or (None if arrived.is_set() else V0)

    async def of(version: PolicyVersion) -> int:
        stream = (await network.view()).training_stream(network.run_id)
        return sum(item.record.policy_version == version for item in stream)

    async def have(version: PolicyVersion, count: int) -> bool:
        return await of(version) >= count

    newer = PolicyVersion(1)
    async with running(network.worker(0, Slow), network.validator(0), network.validator(1)):
        await eventually(lambda: have(V0, 1))
        await network.publish(newer)
        # A ticket may have been leased before; step 1 may train on either version.
        done = await of(V0)
        await eventually(lambda: have(V0, done + 3))
        assert await of(newer) == 0
        arrived.set()
        await eventually(lambda: have(newer, 1))
    records = [r for b in (await network.view()).batches.values() for r in b.records or ()]
    assert {record.verdict for record in records} == {Verdict.ACCEPTED}


async def test_rotated_node_stops_at_once_and_what_was_earned_stays(network: Network) -> None:
    worker = WORKERS[0]
    judges = (network.validator(0), network.validator(1))
    async with running(network.worker(0), *judges) as tasks:

        async def has_worked() -> bool:
            return await accepted(network, 0) >= 1

        await eventually(has_worked)
        fresh = Wallet(address_of(keccak(b"fresh node")), keccak(b"fresh node"))
        async with await Chain.connect(
            network.anvil.rpc_url, network.folder / "deployments", key=worker.key
        ) as chain:
            await rotate_node(chain, worker.address, fresh)
        with pytest.raises(ConfigError, match="is served by node"):
            async with asyncio.timeout(180):
                await tasks[0]
    view = await network.view()
    earnings = await find_earnings(network.owner, view, network.run_id, worker.address)
    assert len(earnings.claimable) + len(earnings.pending) >= 1
    assert view.stake(network.run_id, worker.address).slashed_wei == 0


async def muster(*words: str) -> Any:
    """Run a command of this machine's users, in a thread of its own."""
    commands: dict[str, Any] = {"wallet": wallet, "stake": stake, "rewards": rewards}
    result = await asyncio.to_thread(
        CliRunner().invoke, commands[words[0]], list(words[1:]), env={"MUSTER_PASSWORD": "secret"}
    )
    assert result.exception is None, result.output
    return result


async def test_newcomer_stakes_and_looks_at_rewards_from_the_command_line(network: Network) -> None:
    folder = network.folder
    chain = ["--rpc", network.anvil.rpc_url, "--deployments", str(folder / "deployments")]
    for name in ("cold", "hot"):
        await muster("wallet", "new", str(folder / name), "--light")
    newcomer = to_address((await muster("wallet", "show", str(folder / "cold"))).stdout.strip())
    await network.anvil.set_balance(newcomer, TOKEN)

    keys = ["--keystore", str(folder / "cold"), "--node", str(folder / "hot")]
    staked = await muster("stake", "--run", "1", *keys, "--faucet", "--yes", *chain)
    assert staked.stdout.startswith("0x")
    assert "join run 1 under its terms 1" in staked.stderr
    assert "at most these 100 tokens, to this run only" in staked.stderr
    number, _ = await network.owner.workers.worker_of(newcomer)
    member = await network.owner.workers.member_of(network.run_id, newcomer)
    assert (member.status, number) == (WorkerStatus.ACTIVE, 3)

    more = ["--keystore", str(folder / "cold"), "--amount", "2.5", "--faucet", "--yes"]
    await muster("stake", "--run", "1", *more, *chain)
    staked_wei = await network.owner.vault.active_stake(network.run_id, newcomer)
    assert staked_wei == 102 * TOKEN + TOKEN // 2
    shown = await muster("rewards", "--run", "1", "--worker", newcomer, "--json", *chain)
    assert json.loads(shown.stdout)["claimable_slots"] == 0
