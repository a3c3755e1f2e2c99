"""Nine contracts on Anvil against their model in Python.

The model is `muster.lab.simulator.model`, written from the interfaces; `contracts_duel` gives
every call to both and compares them after it; `contracts_life` draws the calls, `contracts_story`
tells them.
"""

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
from contracts_duel import CROWD, JURORS, NAMES, VALIDATORS, WALLET, Calls
from contracts_life import EVER, FIXED, TERMS, Life
from contracts_stage import CONTRACTS, Stage
from contracts_story import tell
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from muster.app.anvil import Anvil
from muster.chain.abi import CONTRACTS as EVERY_CONTRACT, contract_abi
from muster.chain.rpc import Rpc
from muster.deploy import DeployParameters, deploy_contracts
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.words import Run

EMITTING = [name for name in EVERY_CONTRACT if name != "MusterToken"]
RPC_S = 60.0
"""Mining hundreds of blocks takes a while on a busy machine."""
PARAMETERS = DeployParameters(
    initial_supply=0,
    required_worker_stake=FIXED.required_stake,
    required_validator_stake=FIXED.required_validator_stake,
    required_juror_stake=FIXED.required_juror_stake,
    activation_delay_blocks=FIXED.activation_delay,
    jail_time_s=FIXED.jail_time,
    challenge_window_s=FIXED.challenge_window,
    outcome_deadline_s=FIXED.outcome_deadline,
    vote_commit_s=FIXED.commit_time,
    vote_reveal_s=FIXED.reveal_time,
    draw_delay_blocks=FIXED.draw_delay,
    jury_size=FIXED.jury_size,
    bond=FIXED.bond,
    juror_fee=FIXED.juror_fee,
    wrong_verdict_ppm=FIXED.wrong_verdict_ppm,
    absence_ppm=FIXED.absence_ppm,
    change_delay_s=FIXED.change_delay,
    slash_pause_s=FIXED.slash_pause,
    slash_cooldown_s=FIXED.slash_cooldown,
    claim_period_s=FIXED.claim_period,
    stake_per_unit=FIXED.stake_per_unit,
    unbonding_s=FIXED.unbonding,
    insurance_ppm=FIXED.insurance_ppm,
    reporter_ppm=FIXED.reporter_ppm,
    reporter_cap=FIXED.reporter_cap,
)


# ------------------------------------------------------------------------- the stage


@pytest.fixture(scope="module")
def duel() -> Iterator[Calls]:
    with asyncio.Runner() as runner:
        anvil = Anvil(block_time_s=Anvil.STILL_S)
        runner.run(anvil.__aenter__())
        rpc = Rpc(anvil.rpc_url, timeout_s=RPC_S)
        try:
            yield runner.run(_deployed(runner, rpc, anvil.rpc_url))
        finally:
            runner.run(rpc.close())
            runner.run(anvil.__aexit__(None, None, None))


async def _deployed(runner: asyncio.Runner, rpc: Rpc, url: str) -> Calls:
    insurance = Stage.address_of("insurance")
    parameters = PARAMETERS.model_copy(update={"insurance": insurance})
    deployment = await deploy_contracts(url, Anvil.key(0), parameters)
    stage = Stage(rpc, deployment, NAMES)
    await rpc.call("anvil_autoImpersonateAccount", True)
    head = await rpc.call("eth_getBlockByNumber", "latest", False)
    now, block = int(head["timestamp"], 16), int(head["number"], 16)
    for name in NAMES:
        await rpc.call("anvil_setBalance", stage.words.address[name], hex(10**24))
    model = Network(FIXED, now, block, stage.words.rank)
    await _hand_out(stage, model)
    return Calls(runner, stage, model)


async def _hand_out(stage: Stage, model: Network) -> None:
    """Give everybody tokens and approve the contracts: a stranger's only for 100 wei."""
    for name in CROWD:
        stage.acting, stage.now = name, model.now + 1
        await stage.token.faucet(stage.words.address[name], WALLET)
        model.balances[name] = WALLET
        for holder in CONTRACTS:
            allowed = 100 if name == "stranger" else 2**256 - 1
            stage.now += 1
            await stage.token.approve(stage.words.address[holder], allowed)
            model.allowances[name, holder] = allowed
        model.now, model.block = stage.now, model.block + 1 + len(CONTRACTS)


@pytest.fixture(scope="module")
def lives(duel: Calls) -> type[Life]:
    """Lives that all begin at the same block of one chain."""
    for owner in ("owner", "challenger"):
        invited = list(VALIDATORS[:5]) if owner == "owner" else ["v0"]
        terms = TERMS if owner == "owner" else TERMS._replace(quorum=1)
        assert duel.create_run(owner, Run("", "trainer", "orchestrator", terms, invited))
        assert duel.fund(owner, len(duel.model.runs), 100_000)
    for validator in VALIDATORS[:5]:
        assert duel.simple(validator, "take_seat", 1, 1, FIXED.required_validator_stake)
    assert duel.simple("v0", "take_seat", 2, 1, FIXED.required_validator_stake)
    for juror in JURORS:
        assert duel.simple(juror, "join_bench", FIXED.required_juror_stake)
    assert duel.join("alice", 1, 1, 1500, "node a", EVER, consents=True, permit=False)
    stake = FIXED.required_stake
    assert duel.join("bob", 1, 1, stake, "node b", EVER, consents=True, permit=True)
    assert duel.join("alice", 2, 1, stake, "nobody", EVER, consents=True, permit=False)
    duel.mine(FIXED.activation_delay)
    model, rpc = duel.model, duel.stage.rpc
    snapshot = [duel.runner.run(rpc.call("evm_snapshot"))]

    def begin() -> Calls:
        duel.runner.run(rpc.call("evm_revert", snapshot.pop()))
        # Blocks must not have the machine's time: the same choices must give the same life.
        duel.runner.run(rpc.call("anvil_setBlockTimestampInterval", 0))
        snapshot.append(duel.runner.run(rpc.call("evm_snapshot")))
        duel.model, duel.next_time = copy.deepcopy(model), 0
        return duel

    Life.begin = staticmethod(begin)  # type: ignore[method-assign,assignment]
    return Life


def test_every_event_happens_as_the_model_says(lives: type[Life]) -> None:
    duel = lives.begin()
    duel.happened.clear()
    tell(duel)
    events = {event.name for name in EMITTING for event in contract_abi(name).events}
    assert events - set(duel.happened) == {"EIP712DomainChanged"}


def live(lives: type[Life], **options: Any) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        lives, settings=settings(deadline=None, suppress_health_check=quiet, **options)
    )


def test_contracts_do_what_the_model_says(lives: type[Life]) -> None:
    live(lives, max_examples=6, stateful_step_count=25, derandomize=True, database=None)


@pytest.mark.slow
def test_contracts_do_what_the_model_says_in_many_lives(lives: type[Life]) -> None:
    live(lives, max_examples=200, stateful_step_count=50)
