"""Stake: signatures, terms that are shown before it is sent, and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner
from worlds.client_world import NODE_KEY, OTHER_KEY, RULES, RUN

from muster.api import OrchestratorApi
from muster.chain import (
    ZERO_ADDRESS,
    Chain,
    NodeConsent,
    Permit,
    RunTerms,
    StakeAccount,
    WorkerStatus,
)
from muster.client.cli.keys import rotate
from muster.client.cli.stake import shown_recipe, stake
from muster.client.preflight import require_cold, require_hot, require_worker
from muster.client.quantities import WEI_PER_TOKEN
from muster.client.stake import (
    add_stake,
    join_run,
    leaving,
    require_free_of_draws,
    stake_command,
    stake_offer,
    take_from_faucet,
    what_next,
)
from muster.protocol.eip712 import Domain, address_of, digest, recover
from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.errors import ConfigError, ContractRevert, NotYet
from muster.protocol.ids import Address, RunId, to_address
from muster.protocol.messages import NodeRegistration
from muster.wallet import Wallet, save_wallet

OWNER = Wallet(address_of(OTHER_KEY), OTHER_KEY)
NODE = Wallet(address_of(NODE_KEY), NODE_KEY)
VAULT, REGISTRY, TOKEN = (
    to_address(keccak(name)[:20]) for name in (b"vault", b"registry", b"token")
)
ANOTHERS = keccak(b"the domain of another token")
"""What a hostile endpoint says that the token's domain is."""
ADD_40 = "muster stake --run 7 --keystore FILE --amount 40"
REJOIN = "muster worker rejoin --run 7 makes it active"
TERMS = RunTerms(price_per_unit=3, fraud_ppm=100_000, exact_fraud_ppm=250_000, quorum=2)


class FakeContract:
    """Answers views from a table, and notes writes."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.written: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            if name in self.answers:
                answer = self.answers[name]
                return answer(*args) if callable(answer) else answer
            self.written.append((name, *args))
            return SimpleNamespace(tx_hash=f"0x{len(self.written)}")

        return call


class FakeChain:
    """The contracts that stake uses."""

    allow = Chain.allow

    def __init__(
        self,
        status: WorkerStatus = WorkerStatus.NONE,
        chain_id: int = 31337,
        proposed_at: int = 0,
        node: Address = ZERO_ADDRESS,
    ) -> None:
        self.chain_id = chain_id
        self.closed_at = 0
        self.me = OWNER.address
        self.deployment = SimpleNamespace(contracts={"StakeVault": VAULT})
        self.token = FakeContract(
            nonces=4, domain_separator=ANOTHERS, balance_of=150 * WEI_PER_TOKEN, allowance=0
        )
        is_member = status is not WorkerStatus.NONE
        self.workers = FakeContract(
            nonces=2,
            required_stake=100 * WEI_PER_TOKEN,
            worker_of_node=ZERO_ADDRESS,
            worker_of=(3 if is_member else 0, node),
            member_of=SimpleNamespace(status=status, active_from=0, jailed_until=5_400),
        )
        self.runs = FakeContract(
            run_count=RUN,
            terms_of=(TERMS, 4),
            proposed_change=(TERMS, proposed_at),
            latest_version=None,
            is_validator=False,
            is_invited=False,
        )
        self.ledger = FakeContract(stake_per_unit=WEI_PER_TOKEN)
        active = 100 * WEI_PER_TOKEN if is_member else 0
        self.vault = FakeContract(
            unbonding_period=86400,
            active_stake=active,
            account_of=StakeAccount(active, 0, 0, 0),
        )

    async def read(self, contract: str, function: str, _args: list[Any]) -> list[int]:
        assert (contract, function) == ("RunRegistry", "closedAt")
        return [self.closed_at]

    def domain(self, contract: str) -> Domain:
        return Domain(self.chain_id, TOKEN if contract == "MusterToken" else REGISTRY)

    async def now(self) -> int:
        return 5_000

    async def block_number(self) -> int:
        return 9


def recipe_of(units: int, steps: int = 0) -> Any:
    """Return a recipe with tickets of that many units at most, and that many training steps."""
    return SimpleNamespace(
        sampling=SimpleNamespace(max_units=units), training=SimpleNamespace(steps=steps)
    )


def permit_signer(amount: int, permit: Permit) -> Address:
    """Return who signed the ERC-2612 permit, encoded here word by word."""
    permit_type = keccak(
        b"Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
    )
    words = (address_bytes(OWNER.address), address_bytes(VAULT), amount, 4, permit.deadline)
    struct = keccak(abi_words(permit_type, *words))
    signature = permit.r + permit.s + bytes([permit.v])
    # As OpenZeppelin's ERC20Permit("Muster") computes it.
    domain_type = (
        b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
    )
    named = (keccak(domain_type), keccak(b"Muster"), keccak(b"1"))
    separator = keccak(abi_words(*named, 31337, address_bytes(TOKEN)))
    return recover(keccak(b"\x19\x01" + separator + struct), signature)


async def test_worker_joins_a_run_under_its_terms_in_one_transaction() -> None:
    chain: Any = FakeChain()
    await join_run(chain, OWNER, NODE, RUN, 100)
    [(name, run_id, terms, amount, consent, permit)] = chain.workers.written
    assert (name, run_id, terms, amount) == ("join", RUN, 4, 100)
    assert (consent.node, consent.deadline) == (NODE.address, 8_600)
    registration = NodeRegistration(OWNER.address, NODE.address, 2, consent.deadline)
    signed = digest(Domain(31337, REGISTRY), registration.struct_hash())
    assert recover(signed, consent.signature) == NODE.address
    assert permit_signer(100, permit) == OWNER.address
    assert permit_signer(101, permit) != OWNER.address


async def test_worker_of_another_run_keeps_its_node() -> None:
    chain: Any = FakeChain(node=NODE.address)
    await join_run(chain, OWNER, None, RUN, 100)
    assert chain.workers.written[0][4] == NodeConsent(ZERO_ADDRESS, 0, b"")
    assert (await stake_offer(chain, OWNER.address, RUN, None, with_node=False)).joins


async def test_who_has_no_node_must_name_one() -> None:
    chain: Any = FakeChain()
    with pytest.raises(ConfigError, match="has no node yet"):
        await stake_offer(chain, OWNER.address, RUN, None, with_node=False)


async def test_nobody_joins_while_terms_are_about_to_change() -> None:
    chain: Any = FakeChain(proposed_at=9)
    with pytest.raises(ConfigError, match="terms of run 7 are about to change"):
        await stake_offer(chain, OWNER.address, RUN, None, with_node=True)


async def test_stake_is_added_for_one_run_once_the_vault_may_take_it() -> None:
    chain: Any = FakeChain()
    await add_stake(chain, RUN, OWNER.address, 7)
    assert chain.token.written == [("approve", VAULT, 7)]
    assert chain.vault.written == [("deposit", RUN, OWNER.address, 7)]


async def test_offer_says_what_is_locked_signed_for_how_long_and_what_can_be_lost() -> None:
    chain: Any = FakeChain()
    offer = await stake_offer(chain, OWNER.address, RUN, None, with_node=True)
    assert offer.amount_wei == 100 * WEI_PER_TOKEN
    text = offer.describe()
    assert "100 of 150 tokens" in text
    assert "back    1 d after muster unstake" in text
    assert "signs   join run 7 under its terms 4" in text
    assert "risk    " in text


async def test_offer_to_who_unbonds_says_that_all_of_it_can_be_lost() -> None:
    chain: Any = FakeChain(WorkerStatus.JAILED, node=NODE.address)
    chain.vault.answers["account_of"] = StakeAccount(5 * WEI_PER_TOKEN, 95 * WEI_PER_TOKEN, 9, 0)
    offer = await stake_offer(chain, OWNER.address, RUN, 10 * WEI_PER_TOKEN, with_node=False)
    assert "at most these 110 tokens (95 of them unbond), to this run" in offer.describe()
    needed = await stake_offer(chain, OWNER.address, RUN, None, with_node=False)
    assert needed.amount_wei == 95 * WEI_PER_TOKEN


@pytest.mark.parametrize(
    ("units", "asked", "amount", "says"),
    [
        (120, None, 120, "work    comes: this run's largest ticket takes 120 tokens, 120 will be"),
        (80, None, 100, "work    comes: this run's largest ticket takes 80 tokens, 100 will be"),
        (120, 100, 100, "work    does not come: this run's largest ticket takes 120 tokens, only"),
        (None, None, 100, "--orchestrator URL says how much that takes"),
    ],
)
async def test_default_amount_covers_the_largest_ticket_of_the_recipe(
    units: int | None, asked: int | None, amount: int, says: str
) -> None:
    chain: Any = FakeChain()
    asked_wei = asked and asked * WEI_PER_TOKEN
    offer = await stake_offer(
        chain, OWNER.address, RUN, asked_wei, with_node=True, recipe=units and recipe_of(units)
    )
    assert offer.amount_wei == amount * WEI_PER_TOKEN
    assert says in offer.describe()
    offer.require_something(with_node=True)


@pytest.mark.parametrize("is_other", [False, True])
async def test_recipe_is_the_one_on_chain(
    is_other: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RULES.recipe
    shown = recipe.to_bytes() + b" " * is_other
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=shown))
    async with OrchestratorApi("http://orchestrator", transport=transport) as api:
        found = await shown_recipe(api, keccak(recipe.to_bytes()))
    assert found == (None if is_other else recipe)
    assert ("the orchestrator shows no recipe" in capsys.readouterr().err) is is_other


async def test_a_validators_stake_covers_no_tickets() -> None:
    chain: Any = FakeChain()
    chain.runs.answers["is_validator"] = True
    recipe = recipe_of(units=120)
    offer = await stake_offer(chain, OWNER.address, RUN, None, with_node=False, recipe=recipe)
    assert offer.amount_wei == 100 * WEI_PER_TOKEN
    assert "work    " not in offer.describe()


@pytest.mark.parametrize(
    ("status", "invited", "is_warned"),
    [
        (WorkerStatus.NONE, True, True),
        (WorkerStatus.NONE, False, False),
        (WorkerStatus.ACTIVE, True, False),
    ],
)
async def test_who_is_invited_to_validate_a_run_is_warned_before_it_works_for_it(
    status: WorkerStatus, invited: bool, is_warned: bool
) -> None:
    chain: Any = FakeChain(status, node=NODE.address)
    chain.runs.answers["is_invited"] = invited
    offer = await stake_offer(chain, OWNER.address, RUN, 5, with_node=False)
    warning = "note    this account is invited to validate run 7 (muster validator join); once it "
    assert (warning + "works for the run, it never can" in offer.describe()) is is_warned


async def test_worker_joins_under_the_terms_that_it_was_shown() -> None:
    chain: Any = FakeChain()
    await join_run(chain, OWNER, NODE, RUN, 100, terms=3)
    assert chain.workers.written[0][2] == 3


async def test_a_member_does_not_join_again() -> None:
    chain: Any = FakeChain(WorkerStatus.ACTIVE, node=NODE.address)
    offer = await stake_offer(chain, OWNER.address, RUN, 5, with_node=False)
    assert not offer.joins
    offer.require_something(with_node=False)
    with pytest.raises(ConfigError, match="in run 7 already, and keeps its node"):
        offer.require_something(with_node=True)
    nothing = await stake_offer(chain, OWNER.address, RUN, None, with_node=False)
    with pytest.raises(ConfigError, match="100 tokens are staked for run 7 already"):
        nothing.require_something(with_node=False)


async def test_stake_for_no_run_is_refused() -> None:
    chain: Any = FakeChain()
    with pytest.raises(ConfigError, match="there is no run 8, there are 7"):
        await stake_offer(chain, OWNER.address, RunId(8), None, with_node=True)


async def test_stake_that_brings_no_work_is_refused() -> None:
    banned: Any = FakeChain(WorkerStatus.BANNED, node=NODE.address)
    with pytest.raises(ConfigError, match="is banned from run 7"):
        await stake_offer(banned, OWNER.address, RUN, 5, with_node=False)
    closed: Any = FakeChain(WorkerStatus.ACTIVE, node=NODE.address)
    closed.closed_at = 9
    with pytest.raises(ConfigError, match="run 7 was closed on 1970-01-01 00:00:09 UTC"):
        await stake_offer(closed, OWNER.address, RUN, 5, with_node=False)


@pytest.mark.parametrize("joined", [WorkerStatus.NONE, WorkerStatus.ACTIVE])
async def test_stake_for_a_finished_run_is_refused(joined: WorkerStatus) -> None:
    chain: Any = FakeChain(joined, node=NODE.address)
    chain.runs.answers["latest_version"] = 2
    with pytest.raises(ConfigError, match="run 7 is finished, with version 2 of 2: stake brings"):
        await stake_offer(
            chain, OWNER.address, RUN, 5, with_node=False, recipe=recipe_of(80, steps=2)
        )


@pytest.mark.parametrize(("version", "steps"), [(None, 2), (1, 2), (2, 0)])
async def test_stake_for_a_run_with_steps_left_is_taken(version: int | None, steps: int) -> None:
    chain: Any = FakeChain(node=NODE.address)
    chain.runs.answers["latest_version"] = version
    recipe = recipe_of(80, steps)
    assert (
        await stake_offer(chain, OWNER.address, RUN, None, with_node=False, recipe=recipe)
    ).joins


async def test_a_validator_of_a_finished_run_may_add_stake() -> None:
    chain: Any = FakeChain()
    chain.runs.answers |= {"latest_version": 2, "is_validator": True}
    recipe = recipe_of(80, steps=2)
    offer = await stake_offer(chain, OWNER.address, RUN, 5, with_node=False, recipe=recipe)
    assert offer.amount_wei == 5


async def test_stake_beyond_the_balance_is_refused_before_it_is_sent() -> None:
    chain: Any = FakeChain()
    offer = await stake_offer(chain, OWNER.address, RUN, 151 * WEI_PER_TOKEN, with_node=True)
    with pytest.raises(ConfigError, match="holds 150 tokens, staking takes 151") as caught:
        offer.require_funds()
    assert f"send 1 tokens to {OWNER.address}" in (caught.value.hint or "")


async def test_faucet_is_for_development_chains() -> None:
    chain: Any = FakeChain()
    await take_from_faucet(chain, OWNER.address, 9)
    assert chain.token.written == [("faucet", OWNER.address, 9)]
    with pytest.raises(ConfigError, match="has no faucet"):
        await take_from_faucet(FakeChain(chain_id=1), OWNER.address, 9)  # type: ignore[arg-type]


def test_amount_of_the_command_for_more_stake_is_plain() -> None:
    command = stake_command(RUN, 1_234_500 * WEI_PER_TOKEN // 10)
    assert command == f"muster stake --run {RUN} --keystore FILE --amount 123450"


# What comes next


@pytest.mark.parametrize(
    ("status", "active", "says"),
    [
        ("ACTIVE", 60, "active now"),
        ("JAILED", 60, f"jailed until 1970-01-01 01:30:00 UTC at least: {ADD_40}, then {REJOIN}"),
        ("JAILED", 100, f"jailed until 1970-01-01 01:30:00 UTC at least: {REJOIN}"),
        ("EXITING", 60, f"leaving: {ADD_40}, then {REJOIN}"),
        ("EXITING", 100, f"leaving: {REJOIN}"),
    ],
)
async def test_way_back_begins_with_the_stake_that_is_missing(
    status: str, active: int, says: str
) -> None:
    chain: Any = FakeChain(WorkerStatus[status], node=NODE.address)
    chain.vault.answers["active_stake"] = active * WEI_PER_TOKEN
    assert f"; worker 3, {says}\n" in await what_next(chain, OWNER.address, RUN)


# The bench


class FakeBench:
    """A bench that refuses in a rehearsal."""

    def __init__(self, refusal: ContractRevert) -> None:
        self.refusal, self.jurors = refusal, self

    def rehearsed_by(self, _account: Address) -> FakeBench:
        return self

    async def join(self, _stake: int) -> None:
        raise self.refusal

    async def now(self) -> int:
        return 5_000


async def test_who_left_the_bench_is_told_when_it_may_come_back() -> None:
    bench: Any = FakeBench(ContractRevert("PoolPlaceHeld", (OWNER.address, 5_399)))
    with pytest.raises(NotYet, match="join it again from 1970-01-01 01:30:00 UTC, in 6 min 40 s"):
        await require_free_of_draws(bench, OWNER.address)


async def test_stake_that_is_still_missing_keeps_nobody_from_the_bench() -> None:
    bench: Any = FakeBench(ContractRevert("PoolStakeTooLow", (OWNER.address, 0, 500)))
    await require_free_of_draws(bench, OWNER.address)


# Keys of worker and node


@pytest.mark.parametrize(("command", "words"), [(stake, ("--run", "7")), (rotate, ())])
def test_a_workers_own_key_is_not_taken_for_its_node(
    command: click.Command, words: tuple[str, ...], tmp_path: Path
) -> None:
    key = tmp_path / "worker.json"
    save_wallet(key, OTHER_KEY, "secret", light=True)
    both = ("--keystore", str(key), "--node", str(key), *words, "--yes")
    result = CliRunner().invoke(command, both, env={"MUSTER_PASSWORD": "secret"})
    assert isinstance(result.exception, ConfigError)
    assert f"{OWNER.address} is the worker's own key" in str(result.exception)
    assert "--node" in (result.exception.hint or "")


def test_another_key_is_taken_for_a_node() -> None:
    require_hot(NODE.address, OWNER.address)


async def test_who_became_its_own_node_keeps_what_a_worker_may_do() -> None:
    chain: Any = FakeChain(WorkerStatus.ACTIVE, node=OWNER.address)
    chain.workers.answers["worker_of_node"] = OWNER.address
    await require_cold(chain, OWNER.address)
    assert (await require_worker(chain, OWNER.address)).node == OWNER.address
    assert (await leaving(chain, OWNER.address, RUN)).amount(None) == 100 * WEI_PER_TOKEN


async def test_a_node_that_is_no_worker_may_not_do_what_a_worker_may() -> None:
    chain: Any = FakeChain()
    chain.workers.answers["worker_of_node"] = OWNER.address
    for refused in (require_cold(chain, NODE.address), require_worker(chain, NODE.address)):
        with pytest.raises(ConfigError, match=f"is the node of worker {OWNER.address}"):
            await refused


@pytest.mark.parametrize("unbonding", [0, 5])
async def test_stake_of_a_node_is_taken_back_by_whom_it_belongs_to(unbonding: int) -> None:
    chain: Any = FakeChain()
    chain.workers.answers["worker_of_node"] = OWNER.address
    chain.vault.answers["account_of"] = StakeAccount(0, unbonding, 1, 0)
    if unbonding:
        assert (await leaving(chain, NODE.address, RUN)).is_due
        return
    with pytest.raises(ConfigError, match=f"is the node of worker {OWNER.address}"):
        await leaving(chain, NODE.address, RUN)
