"""The beginning of a simulated network: the run's terms, and everyone's money, stake and seat."""

from collections.abc import Sequence

from muster.chain import RunConfig, RunTerms
from muster.lab.simulator.chain import Call
from muster.lab.simulator.model import words
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.scenario import CALIBRATION, FUNDS, MAX_SEATS, RUN, TOKEN
from muster.lab.simulator.world import Person
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address
from muster.protocol.recipe import Recipe
from muster.tasks import TaskSet


def config_of(
    keys: dict[str, bytes],
    recipe: Recipe,
    tasks: TaskSet,
    validators: Sequence[Person],
    quorum: int,
) -> RunConfig:
    """Return the run's terms; they invite the first MAX_SEATS validators."""
    return RunConfig(
        trainer=address_of(keys["trainer"]),
        orchestrator=address_of(keys["orchestrator"]),
        base_model_hash=keccak(b"base model"),
        task_set_hash=tasks.hash(),
        recipe_hash=recipe.hash(),
        calibration_hash=keccak(CALIBRATION.to_bytes()),
        terms=RunTerms(TOKEN // 1000, 100_000, 500_000, quorum),
        validators=tuple(person.address for person in validators[:MAX_SEATS]),
    )


def founding(
    owner: Address,
    config: RunConfig,
    workers: Sequence[Person],
    validators: Sequence[Person],
    jurors: Sequence[Person],
    fixed: words.Fixed,
) -> Call:
    """Return the call that gives everyone money, creates and funds the run, and has all join."""
    run = words.Run(
        owner, config.trainer, config.orchestrator, _terms(config.terms),
        validators=list(config.validators),
    )  # fmt: skip
    nodes = {person.name: address_of(person.key) for person in workers}

    def found(state: Network) -> None:
        state.balances[owner] = FUNDS
        state.create_run(owner, run)
        state.allowances[owner, "RewardEscrow"] = FUNDS
        state.fund(owner, int(RUN), FUNDS)
        stake = fixed.required_validator_stake
        for person in validators:
            state.balances[person.address] = stake
            state.allowances[person.address, "StakeVault"] = stake
            if person.address in run.validators:
                state.take_seat(person.address, int(RUN), 1, stake)
        stake = fixed.required_juror_stake
        for person in jurors:
            state.balances[person.address] = state.allowances[person.address, "StakeVault"] = stake
            state.join_bench(person.address, stake)
        stake = 2 * fixed.required_stake
        for person in workers:
            state.balances[person.address] = stake + fixed.bond
            named = (nodes[person.name], 2**63)
            state.join(person.address, int(RUN), 1, stake, *named, consents=True, permit=True)

    return found


def _terms(terms: RunTerms) -> words.Terms:
    return words.Terms(terms.price_per_unit, terms.fraud_ppm, terms.exact_fraud_ppm, terms.quorum)
