"""The breaker among real services and contracts: disturbed validators cost no honest worker its
stake, and no cheater gets away by the pause.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import client_network
import numpy as np
import pytest
from click.testing import CliRunner

from muster.app.anvil import Anvil
from muster.app.demo.adversary import ForgedReward
from muster.chain import BatchView, Chain, Offence, PauseCause, SlashState, SlashView, WorkerStatus
from muster.client.cli.dispute import dispute
from muster.client.settings import WorkerSettings
from muster.client.stake import join_run, take_from_faucet
from muster.client.validator.loop import ValidatorLoop
from muster.client.validator.soundness import Flaw
from muster.client.worker.loop import WorkerLoop
from muster.client.worker.process import run_worker
from muster.inference.examining import Recomputed
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.messages import Reason, Ticket, Verdict
from muster.protocol.recipe import BreakerRecipe
from muster.protocol.rollouts import Rollout
from muster.wallet import Wallet, save_wallet

PAUSE_S = 300
WINDOW_S = 300
LIMITS = BreakerRecipe(min_workers=2)
RUN = client_network.Run(recipe=client_network.RECIPE.model_copy(update={"breaker": LIMITS}))
STAKE = 100 * client_network.TOKEN
CHEATER = Wallet(address_of(Anvil.key(9)), Anvil.key(9))
CHEATERS_NODE = Wallet(address_of(keccak(b"node 2")), keccak(b"node 2"))
LONG = client_network.PARAMETERS.model_copy(
    update={
        "challenge_window_s": WINDOW_S,
        "slash_pause_s": PAUSE_S,
        "vote_commit_s": 120,
        "vote_reveal_s": 60,
    }
)


class DisturbedEngine(client_network.world.HashEngine):
    """A prefill whose hidden states have the wrong sign."""

    def recompute(self, samples: Any) -> list[Recomputed]:
        found = super().recompute(samples)
        return [Recomputed(p.hidden_TH ^ np.uint16(0x8000), p.logits_TV) for p in found]


def disturbed(_settings: object) -> Any:
    return DisturbedEngine()


class Blind(ValidatorLoop):
    """Runs no check of its own soundness."""

    async def find_flaw(self, _batch: BatchView) -> Flaw | None:
        return None


class Brief(WorkerLoop):
    """Generates for three tickets, then stops."""

    generated = 0

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        self.generated += 1
        if self.generated > 3:
            await asyncio.Event().wait()
        return await super().generate(ticket)


class BriefForger(ForgedReward, Brief):
    """Claims that every answer is right, three times."""


async def slashed_workers(network: client_network.Network) -> list[SlashView]:
    frauds = (Offence.FRAUD, Offence.EXACT_FRAUD)
    return [slash for slash in (await network.view()).slashes if slash.offence in frauds]


async def frauds_of(network: client_network.Network, *workers: Wallet) -> list[tuple[int, int]]:
    """Batch and position of every fraud found in the work of these workers."""
    view = await network.view()
    numbers = {view.workers[worker.address].worker_id for worker in workers}
    return [
        (batch.batch_id, position)
        for batch in view.batches.values()
        for position, record in enumerate(batch.records or ())
        if record.worker_id in numbers and record.verdict is Verdict.FRAUD
    ]


async def is_paused(network: client_network.Network) -> bool:
    return bool((await network.view()).runs[network.run_id].pauses)


async def are_accused(network: client_network.Network, *workers: Wallet) -> bool:
    return all([await frauds_of(network, worker) for worker in workers])


async def is_all_judged(network: client_network.Network) -> bool:
    return all(batch.records for batch in (await network.view()).batches.values())


async def pass_until(network: client_network.Network, time: int) -> None:
    now = await network.owner.now()
    await network.owner.rpc.call("evm_increaseTime", max(time - now, 0) + 1)
    await network.owner.rpc.call("evm_mine")


async def register_cheater(network: client_network.Network) -> None:
    async with await Chain.connect(
        network.anvil.rpc_url, network.folder / "deployments", key=CHEATER.key
    ) as chain:
        await take_from_faucet(chain, CHEATER.address, STAKE)
        await join_run(chain, CHEATER, CHEATERS_NODE, network.run_id, STAKE)


def cheating(network: client_network.Network) -> Any:
    common = network._common("worker-2")
    return run_worker(
        WorkerSettings(**common, worker=CHEATER.address, heartbeat_s=0.5),
        CHEATERS_NODE,
        engine_factory=lambda _settings: client_network.world.HashEngine(),
        loop_class=BriefForger,
    )


@pytest.mark.slow
async def test_honest_workers_keep_their_stake_when_the_quorum_is_disturbed(tmp_path: Path) -> None:
    async with client_network.open_network(tmp_path, LONG, RUN) as network:
        await network.seat_third()
        await network.seat_jurors()
        # A quorum computes something else, and does not check its own soundness.
        async with client_network.running(
            *(network.worker(number, Brief) for number in (0, 1)),
            *(network.validator(number, Blind, disturbed) for number in (0, 1)),
        ):
            await client_network.eventually(lambda: is_paused(network))
            await client_network.eventually(lambda: are_accused(network, *client_network.WORKERS))
        [pause] = (await network.view()).runs[network.run_id].pauses
        assert (pause.cause, pause.reason) == (PauseCause.CORRELATED_FAILURES, 60)
        evidence = (tmp_path / "files" / "evidence").glob("*.json")
        assert [keccak(path.read_bytes()) for path in evidence] == [pause.evidence_hash]
        # Slashes executed before others had failed wait in escrow, and can be given back.
        taken = await slashed_workers(network)
        assert {slash.state for slash in taken} <= {SlashState.ESCROWED}
        assert len(taken) < len(client_network.WORKERS)

        # Repaired, the validators go on; a cheater joins in the middle of the pause.
        await register_cheater(network)
        async with client_network.running(
            *(network.validator(number) for number in (0, 1, 2)),
            *(network.juror(number) for number in range(len(client_network.JURORS))),
        ):
            async with client_network.running(cheating(network)):
                await client_network.eventually(lambda: are_accused(network, CHEATER))
            await client_network.eventually(lambda: is_all_judged(network))
            await overturn(network, await frauds_of(network, *client_network.WORKERS))
            assert len(await slashed_workers(network)) == len(taken)
            assert await network.owner.now() < pause.until

            # The pause is over: the cheater pays, though nobody but the orchestrator acts.
            await pass_until(network, pause.until)

            async def is_slashed() -> bool:
                return len(await slashed_workers(network)) > len(taken)

            await client_network.eventually(is_slashed)
            await pass_until(network, pause.until + WINDOW_S)
            await asyncio.sleep(3)
        kept = [s for s in await slashed_workers(network) if s.state is not SlashState.RESTORED]
        assert {slash.owner for slash in kept} == {CHEATER.address}
        view = await network.view()
        assert view.contradictions == []
        for worker in client_network.WORKERS:
            found = view.runs[network.run_id].members[worker.address]
            assert (found.active_wei, found.status, found.convictions) == (
                STAKE,
                WorkerStatus.ACTIVE,
                0,
            )
        cheater = view.runs[network.run_id].members[CHEATER.address]
        assert cheater.status is WorkerStatus.BANNED


async def overturn(network: client_network.Network, places: list[tuple[int, int]]) -> None:
    """Claim that verdicts are wrong, and wait until the network's jurors have ruled."""
    owner = network.owner
    await owner.token.faucet(owner.account, len(places) * client_network.PARAMETERS.bond)
    keystore = network.folder / "owner.json"
    save_wallet(keystore, Anvil.key(0), "secret", light=True)
    for batch_id, position in places:
        words = ["open", f"{batch_id}:{position}", "--ruling", "accepted", "--yes"]
        words += ["--keystore", str(keystore), "--orchestrator", network.orchestrator]
        words += ["--rpc", network.anvil.rpc_url]
        words += ["--deployments", str(network.folder / "deployments")]
        opened = await asyncio.to_thread(
            CliRunner().invoke, dispute, words, env={"MUSTER_PASSWORD": "secret"}
        )
        assert opened.exception is None, opened.output

    async def are_closed() -> bool:
        cases = (await network.view()).cases.values()
        return len(cases) == len(places) and all(case.closed for case in cases)

    await client_network.eventually(are_closed, 240)
    assert all(case.overturned for case in (await network.view()).cases.values())


async def test_a_disturbed_validator_pauses_slashing_itself_and_signs_nothing(
    tmp_path: Path,
) -> None:
    async with client_network.open_network(tmp_path, LONG) as network:
        async with client_network.running(
            network.worker(0), network.validator(0, make_engine=disturbed)
        ):
            await client_network.eventually(lambda: is_paused(network))
        view = await network.view()
        [pause] = view.runs[network.run_id].pauses
        assert (pause.by, pause.cause) == (
            client_network.VALIDATORS[0].address,
            PauseCause.KNOWN_GOOD_ITEM,
        )
        assert pause.reason == Reason.TOPLOC_MISMATCH
        [kept] = (tmp_path / "validator-0" / "flaws").glob("*.json")
        assert keccak(kept.read_bytes()) == pause.evidence_hash
        assert json.loads(kept.read_bytes())["validator"] == client_network.VALIDATORS[0].address
        assert (tmp_path / "validator-0" / "outcomes.jsonl").read_bytes() == b""

        # Sound again, it signs the batches that it had left, and nobody is accused.
        async with client_network.running(
            network.worker(0), network.validator(0), network.validator(1)
        ):

            async def has_accepted() -> bool:
                return bool((await network.view()).training_stream(network.run_id))

            await client_network.eventually(has_accepted)
        assert await frauds_of(network, client_network.WORKERS[0]) == []
