"""Stake of an account for a run: depositing and withdrawing it.

A worker joins a run in one transaction: its key signs an ERC-2612 permit, its node's key a consent
(`NodeRegistration`); both are arguments of `WorkerRegistry.join`. Stake is kept per run: no other
run can slash it. Jurors stake for the network's bench, which is run 0. To withdraw, stake first
unbonds for a while, during which earlier work can still be slashed; then a second call withdraws
it. The vault has one date for all unbonding stake of a run: unbonding more moves it. Nothing else
delays a withdrawal.
"""

from dataclasses import dataclass, replace
from typing import cast

from muster.chain import (
    Chain,
    Member,
    NodeConsent,
    Permit,
    Receipt,
    RunTerms,
    StakeAccount,
    WorkerStatus,
)
from muster.chain.structs import ZERO_ADDRESS
from muster.client.preflight import require_cold, require_member
from muster.client.quantities import format_duration, format_time, format_tokens
from muster.client.risks import of_worker
from muster.protocol.eip712 import digest, sign, struct_hash
from muster.protocol.encoding import address_bytes
from muster.protocol.errors import ConfigError, ContractRevert, NotYet
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.jury import BENCH
from muster.protocol.messages import NodeRegistration
from muster.protocol.recipe import Recipe
from muster.wallet import Wallet

CONSENT_S = 3600
"""Seconds for which permit and consent are valid: enough for a slow chain."""
FAUCET_CHAIN_ID = 31337
"""The only chain whose token has a faucet."""
GAS_MONEY = 100 * 10**18
"""Coins in wei that an account gets on that chain."""

_PERMIT_TYPE = "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"


@dataclass(frozen=True, slots=True)
class WorkersStake:
    """The active stake that brings a worker work of a run."""

    required_wei: int
    """What the contracts require in each of its runs."""
    ticket_wei: int | None
    """What covers one ticket; None when nobody showed the run's recipe."""

    @property
    def wei(self) -> int:
        """The larger of both, as far as known: less brings no work."""
        return max(self.required_wei, self.ticket_wei or 0)


async def workers_stake(chain: Chain, ticket_units: int | None) -> WorkersStake:
    """Return the stake for tickets of up to `ticket_units`, if that is known."""
    required = await chain.workers.required_stake()
    if ticket_units is None:
        return WorkersStake(required, None)
    return WorkersStake(required, ticket_units * await chain.ledger.stake_per_unit())


def added(stake: StakeAccount, amount_wei: int) -> StakeAccount:
    """Return a stake after a deposit."""
    return replace(stake, active_wei=stake.active_wei + amount_wei)


@dataclass(frozen=True, slots=True)
class StakeOffer:
    """The terms of a stake, shown before its confirmation."""

    account: Address
    """The account that stakes."""
    run_id: RunId
    terms: RunTerms
    """Pay and penalties of the run."""
    terms_number: int
    """The number of these terms, which a new worker signs."""
    amount_wei: int
    """Tokens in wei to be locked."""
    balance_wei: int
    """Tokens in the wallet, in wei."""
    stake: StakeAccount
    """The account's present stake for the run."""
    needed: WorkersStake
    """Active stake that brings work."""
    unbonding_s: int
    """Seconds between unbonding and withdrawing stake."""
    joins: bool
    """Whether the account becomes a worker of the run; else the amount is only added."""
    works: bool
    """Whether the account is a worker of the run then, not one of its validators."""
    is_invited: bool
    """Whether the account, by joining, gives up a seat that the run's owner invited it to."""

    def require_funds(self) -> None:
        """Raise ConfigError when the wallet holds less than the amount."""
        missing = self.amount_wei - self.balance_wei
        if missing > 0:
            raise ConfigError(
                f"the wallet holds {format_tokens(self.balance_wei)} tokens, staking takes "
                f"{format_tokens(self.amount_wei)}",
                hint=f"send {format_tokens(missing)} tokens to {self.account}; on a development "
                "chain, --faucet gets them",
            )

    def require_something(self, *, with_node: bool) -> None:
        """Raise ConfigError when there is nothing to do, the amount is too small to join, or a node
        is named for a member.
        """
        if self.joins:
            self._require_enough()
            return
        if with_node:
            raise ConfigError(
                f"the account is in run {self.run_id} already, and keeps its node",
                hint="leave out --node to add stake; muster node rotate replaces the node",
            )
        if self.amount_wei == 0:
            raise ConfigError(
                f"{format_tokens(self.stake.active_wei)} tokens are staked for run {self.run_id} "
                f"already, {format_tokens(self.needed.required_wei)} are required",
                hint="--amount TOKENS adds more: it covers more units in flight",
            )

    def _require_enough(self) -> None:
        missing = self.needed.required_wei - self.stake.active_wei
        if self.amount_wei < missing:
            raise ConfigError(
                f"{format_tokens(self.amount_wei)} tokens are too few to join: "
                f"{format_tokens(missing)} are missing",
                hint="leave out --amount to stake just what is missing",
            )

    def describe(self) -> str:
        """Return a description: amount, unbonding time, agreed terms, and possible losses."""
        staked = added(self.stake, self.amount_wei)
        does = f"join run {self.run_id} under its terms {self.terms_number}"
        lines = [
            f"locks   {format_tokens(self.amount_wei)} of {format_tokens(self.balance_wei)} tokens "
            f"(a worker must hold {format_tokens(self.needed.required_wei)} in each of its runs)",
            *([f"work    {self._covers(staked.active_wei)}"] if self.works else []),
            *([f"note    {self._bars()}"] if self.is_invited else []),
            f"back    {format_duration(self.unbonding_s)} after muster unstake asks for it",
            f"signs   {does if self.joins else f'more stake for run {self.run_id}'}",
            *(f"risk    {line}" for line in of_worker(self.run_id, self.terms, staked)),
        ]
        return "\n".join(lines)

    def _bars(self) -> str:
        return (
            f"this account is invited to validate run {self.run_id} (muster validator join); once "
            "it works for the run, it never can, and its node can serve no other worker"
        )

    def _covers(self, staked_wei: int) -> str:
        """Return whether a stake brings work: it must cover the most units of a ticket."""
        ticket_wei = self.needed.ticket_wei
        if ticket_wei is None:
            return (
                "comes if the run has steps left and the stake covers a ticket: --orchestrator URL "
                "says how much that takes"
            )
        needed = f"this run's largest ticket takes {format_tokens(ticket_wei)} tokens"
        if staked_wei < ticket_wei:
            return f"does not come: {needed}, only {format_tokens(staked_wei)} would be staked"
        return f"comes: {needed}, {format_tokens(staked_wei)} will be staked"


async def stake_offer(
    chain: Chain,
    account: Address,
    run_id: RunId,
    amount_wei: int | None,
    *,
    with_node: bool,
    recipe: Recipe | None = None,
) -> StakeOffer:
    """Return the terms of staking for a run; the default amount is the stake that is missing to
    join, and to get the largest ticket of the run's recipe, if that is known.

    Raises ConfigError when the run is unknown, or the account cannot stake for it, or gets no work
    for it.
    """
    terms, number = await terms_of_run(chain, run_id)
    stake = await chain.vault.account_of(run_id, account)
    member = await chain.workers.member_of(run_id, account)
    if member.status is WorkerStatus.BANNED:
        raise ConfigError(
            f"{account} is banned from run {run_id}: stake brings no work",
            hint="a ban ends only when a jury overturns a verdict: muster explain, muster dispute",
        )
    works = not await chain.runs.is_validator(run_id, account)
    if works and recipe is not None:
        await _require_unfinished(chain, run_id, recipe)
    needed = await workers_stake(chain, recipe.sampling.max_units if works and recipe else None)
    joins = works and member.status is WorkerStatus.NONE
    missing = max(needed.wei - stake.active_wei, 0)
    if joins:
        await _require_node(chain, account, with_node=with_node)
        await require_steady(chain, run_id)
    return StakeOffer(
        account=account,
        run_id=run_id,
        terms=terms,
        terms_number=number,
        amount_wei=missing if amount_wei is None else amount_wei,
        balance_wei=await chain.token.balance_of(account),
        stake=stake,
        needed=needed,
        unbonding_s=await chain.vault.unbonding_period(),
        joins=joins,
        works=works,
        is_invited=joins and await chain.runs.is_invited(run_id, account),
    )


async def _require_unfinished(chain: Chain, run_id: RunId, recipe: Recipe) -> None:
    steps, version = recipe.training.steps, await chain.runs.latest_version(run_id)
    if steps and version is not None and version >= steps:
        raise ConfigError(
            f"run {run_id} is finished, with version {version} of {steps}: stake brings no work",
            hint="choose another run of muster run list; muster unstake takes stake back",
        )


async def _require_node(chain: Chain, account: Address, *, with_node: bool) -> None:
    _, node = await chain.workers.worker_of(account)
    if node == ZERO_ADDRESS and not with_node:
        raise ConfigError(
            f"{account} has no node yet: nothing could sign its work",
            hint="give its keystore with --node FILE; muster init makes one",
        )


async def require_steady(chain: Chain, run_id: RunId) -> None:
    """Raise ConfigError while a change of a run's terms is pending: nobody can join then."""
    proposed, effective_at = await chain.runs.proposed_change(run_id)
    if effective_at:
        raise ConfigError(
            f"the terms of run {run_id} are about to change (from {effective_at}: "
            f"{format_tokens(proposed.price_per_unit)} tokens per unit)",
            hint="nobody can join until then: muster run show lists both terms; join when "
            "the new terms are in effect",
        )


async def terms_of_run(chain: Chain, run_id: RunId) -> tuple[RunTerms, int]:
    """Return an open run's present terms and their number; raises ConfigError for another."""
    if run_id > (count := await chain.runs.run_count()):
        raise ConfigError(
            f"there is no run {run_id}, there are {count}", hint="choose a run of muster run list"
        )
    [closed_at] = await chain.read("RunRegistry", "closedAt", [run_id])
    if closed_at:
        raise ConfigError(
            f"run {run_id} was closed on {format_time(closed_at)}, for good: stake brings no work",
            hint="choose another run of muster run list; muster unstake takes stake back",
        )
    return await chain.runs.terms_of(run_id)


async def what_next(chain: Chain, account: Address, run_id: RunId) -> str:
    """Return an account's new state and next command, for display after staking."""
    active_wei = await chain.vault.active_stake(run_id, account)
    held = f"staked  {format_tokens(active_wei)} tokens for run {run_id} are {account}'s now"
    member = await chain.workers.member_of(run_id, account)
    if member.status is WorkerStatus.NONE:
        return f"{held}\nnext    muster validator join --run {run_id} takes a seat"
    number, _ = await chain.workers.worker_of(account)
    blocks = member.active_from - await chain.block_number()
    wait = f"active in {blocks} blocks" if blocks > 0 else "active now"
    if member.status is not WorkerStatus.ACTIVE:
        lacking_wei = await chain.workers.required_stake() - active_wei
        wait = way_back(run_id, member.status, member.jailed_until, lacking_wei)
    return (
        f"{held}; worker {number}, {wait}\n"
        f"next    muster worker run --run {run_id} --keystore NODE.json --orchestrator URL \\\n"
        f"          --worker {account} --state-dir ~/.muster/run-{run_id}\n"
        f"then    muster worker status --run {run_id} --worker {account}"
    )


def way_back(run_id: RunId, status: WorkerStatus, jailed_until: int, lacking_wei: int) -> str:
    """Return how a jailed or leaving worker stands, and what makes it active again; `lacking_wei`
    is how much more active stake it must hold.
    """
    is_jailed = status is WorkerStatus.JAILED
    stands = f"jailed until {format_time(jailed_until)} at least" if is_jailed else "leaving"
    first = f"{stake_command(run_id, lacking_wei)}, then " if lacking_wei > 0 else ""
    return f"{stands}: {first}muster worker rejoin --run {run_id} makes it active"


async def take_gas_money(chain: Chain, account: Address) -> None:
    """Give an account GAS_MONEY; raises ConfigError except on a development chain."""
    _require_faucet(chain)
    await chain.rpc.call("anvil_setBalance", account, hex(GAS_MONEY))


async def take_from_faucet(chain: Chain, account: Address, amount_wei: int) -> None:
    """Mint test tokens to an account; raises ConfigError except on a development chain."""
    _require_faucet(chain)
    await chain.token.faucet(account, amount_wei)


def _require_faucet(chain: Chain) -> None:
    if chain.chain_id != FAUCET_CHAIN_ID:
        raise ConfigError(
            f"chain {chain.chain_id} has no faucet",
            hint="only development chains do: get tokens and gas money elsewhere",
        )


async def join_run(
    chain: Chain,
    worker: Wallet,
    node: Wallet | None,
    run_id: RunId,
    stake_wei: int,
    *,
    terms: int | None = None,
) -> Receipt:
    """Make an account a worker of a run in one transaction, which `chain` sends as the worker.

    It agrees to the terms with that number and to no later ones; by default to the present ones.
    Without a node argument it keeps its node.
    """
    if terms is None:
        _, terms = await chain.runs.terms_of(run_id)
    deadline = await chain.now() + CONSENT_S
    return await chain.workers.join(
        run_id,
        terms,
        stake_wei,
        await consent_of(chain, worker.address, node, deadline),
        await sign_permit(chain, worker, stake_wei, deadline),
    )


async def take_seat(chain: Chain, run_id: RunId, terms: int, stake_wei: int) -> Receipt:
    """Take the validator's seat that the sender is invited to, and add this stake."""
    await chain.allow("StakeVault", stake_wei)
    return await chain.runs.take_seat(run_id, terms, stake_wei)


async def require_free_of_draws(chain: Chain, account: Address) -> None:
    """Raise NotYet while a case may still draw an account for the place on the bench that it left:
    it cannot take another one then.
    """
    try:
        await chain.rehearsed_by(account).jurors.join(0)
    except ContractRevert as error:
        # The contract looks at the stake last: the deposit that follows decides about that.
        if error.name != "PoolPlaceHeld":
            return
        free_at = cast("int", error.args_[1]) + 1  # uint256 by the ABI
        raise NotYet(
            f"{account} left the bench, and can join it again from {format_time(free_at)}, in "
            f"{format_duration(free_at - await chain.now())}: until then a case may draw it for "
            "the place that it left",
            hint="the same command works then",
        ) from error


async def join_bench(chain: Chain, stake_wei: int) -> Receipt:
    """Register the sender as a juror of the network, and add this stake."""
    await chain.allow("StakeVault", stake_wei)
    return await chain.jurors.join(stake_wei)


async def add_stake(chain: Chain, run_id: RunId, owner: Address, stake_wei: int) -> Receipt:
    """Add the sender's tokens to an account's active stake in a run."""
    await chain.allow("StakeVault", stake_wei)
    return await chain.vault.deposit(run_id, owner, stake_wei)


async def consent_of(
    chain: Chain, worker: Address, node: Wallet | None, deadline: int
) -> NodeConsent:
    """Return the node's signed consent to work for the worker, valid until the deadline. Without a
    node the consent is empty, and the worker keeps its node.
    """
    if node is None:
        return NodeConsent(ZERO_ADDRESS, 0, b"")
    consent = NodeRegistration(
        worker=worker,
        node=node.address,
        nonce=await chain.workers.nonces(worker),
        deadline=deadline,
    )
    signature = sign(digest(chain.domain("WorkerRegistry"), consent.struct_hash()), node.key)
    return NodeConsent(node.address, deadline, signature)


async def sign_permit(chain: Chain, owner: Wallet, amount_wei: int, deadline: int) -> Permit:
    """Return the owner's ERC-2612 permit for StakeVault.

    Its domain is computed, not asked for: an endpoint could name the domain of another token.
    """
    permit = struct_hash(
        _PERMIT_TYPE,
        address_bytes(owner.address),
        address_bytes(chain.deployment.contracts["StakeVault"]),
        amount_wei,
        await chain.token.nonces(owner.address),
        deadline,
    )
    signature = sign(digest(chain.domain("MusterToken"), permit), owner.key)
    return Permit(deadline, signature[64], Hash32(signature[:32]), Hash32(signature[32:64]))


_LEAVES = ("Active", "Jailed")
"""Statuses from which a worker exits."""


@dataclass(frozen=True, slots=True)
class LeavingAccount:
    """State of an account that wants to withdraw stake from a run."""

    account: Address
    """Owner of the stake."""
    run_id: RunId
    member: Member
    """Its membership, if it is a worker."""
    stake: StakeAccount
    """Its stake in the run."""
    required_wei: int
    """Active stake that its role requires; 0 without a role."""
    unbonding_s: int
    """Seconds between unbonding and withdrawing stake."""
    is_validator: bool
    """Whether it has a seat."""
    now: int
    """The chain's time."""

    @property
    def is_due(self) -> bool:
        """Whether unbonding stake can be withdrawn now."""
        return self.stake.unbonding_wei > 0 and self.now >= self.stake.withdrawable_at

    def require_due(self) -> None:
        """Raise NotYet when the unbonding stake cannot be withdrawn."""
        if self.is_due:
            return
        left = format_duration(self.stake.withdrawable_at - self.now)
        raise NotYet(
            f"{format_tokens(self.stake.unbonding_wei)} tokens can be withdrawn from "
            f"{format_time(self.stake.withdrawable_at)}, in {left}",
            hint="the same command withdraws them then; --amount or --all asks for more",
        )

    def amount(self, asked_wei: int | None) -> int:
        """Return how much starts to unbond; raises ConfigError when the active stake is smaller."""
        active = self.stake.active_wei
        if active == 0:
            raise ConfigError(
                f"{self.account} has no active stake in run {self.run_id}",
                hint="check --keystore and --run; muster worker status shows a worker's runs",
            )
        if asked_wei is not None and asked_wei > active:
            raise ConfigError(
                f"--amount is {format_tokens(asked_wei)} tokens, only "
                f"{format_tokens(active)} are staked for run {self.run_id}",
                hint="give a smaller --amount, or --all for everything",
            )
        return active if asked_wei is None else asked_wei

    def exits(self, amount_wei: int) -> bool:
        """Whether unbonding this amount ends a worker's membership or a validator's seat."""
        everything = amount_wei == self.stake.active_wei
        return everything and (self.is_validator or self.member.status in _LEAVES)

    def describe(self, amount_wei: int) -> str:
        """Return a description: amount, date of withdrawal, consequences."""
        active = format_tokens(self.stake.active_wei)
        lines = [
            f"account  {self.account}",
            f"unbonds  {format_tokens(amount_wei)} of {active} tokens in run {self.run_id}",
            f"back     from {format_time(self.now + self.unbonding_s)}, in "
            f"{format_duration(self.unbonding_s)}; until then earlier work can still be slashed",
        ]
        if self.stake.unbonding_wei:
            lines.append(
                f"note     {format_tokens(self.stake.unbonding_wei)} tokens that unbond already "
                "wait until then too"
            )
        role = "seat    " if self.is_validator else "worker  "
        if self.exits(amount_wei):
            what = "is given up" if self.is_validator else "leaves this run: no more tickets of it"
            lines.append(f"{role} {what}. Earned rewards stay claimable")
        elif self.stake.active_wei - amount_wei < self.required_wei:
            what = "is lost" if self.is_validator else "is jailed"
            lines.append(f"{role} {what}: it must hold {format_tokens(self.required_wei)} tokens")
        return "\n".join(lines)


async def leaving(chain: Chain, account: Address, run_id: RunId) -> LeavingAccount:
    """Return the state of an account's stake in a run; raises ConfigError for a juror on the bench,
    and for a node's key without stake.
    """
    stake = await chain.vault.account_of(run_id, account)
    if not (stake.active_wei or stake.unbonding_wei):
        await require_cold(chain, account)
    is_validator = run_id != BENCH and await chain.runs.is_validator(run_id, account)
    member = await chain.workers.member_of(run_id, account)
    required = 0
    if is_validator:
        required = await chain.runs.required_validator_stake()
    elif member.status in _LEAVES:
        required = await chain.workers.required_stake()
    elif run_id == BENCH and await chain.jurors.is_juror(account):
        raise ConfigError(
            f"{account} is on the bench",
            hint="leave the bench first: muster juror leave unbonds the stake",
        )
    return LeavingAccount(
        account=account,
        run_id=run_id,
        member=member,
        stake=stake,
        required_wei=required,
        unbonding_s=await chain.vault.unbonding_period(),
        is_validator=is_validator,
        now=await chain.now(),
    )


async def unbond(chain: Chain, state: LeavingAccount, amount_wei: int) -> Receipt:
    """Start to unbond stake, and return the receipt. A worker or validator that unbonds all of it
    leaves the run.
    """
    if not state.exits(amount_wei):
        return await chain.vault.request_unbond(state.run_id, amount_wei)
    if state.is_validator:
        return await chain.runs.leave_seat(state.run_id)
    return await chain.workers.exit(state.run_id)


def stake_command(run_id: RunId, amount_wei: int) -> str:
    """Return the command that adds stake in a run."""
    amount = format_tokens(amount_wei, group="")
    return f"muster stake --run {run_id} --keystore FILE --amount {amount}"


async def return_offer(chain: Chain, account: Address, run_id: RunId) -> tuple[int, str]:
    """Return the number of the terms under which a jailed or leaving worker of a run can be active
    again, and what it agrees to; raises NotYet or ConfigError when that is not possible.
    """
    member = await require_member(chain, account, run_id)
    if member.status in ("Active", "Banned"):
        raise ConfigError(
            f"{account} is {member.status.lower()} in run {run_id}",
            hint="rejoin is only for a worker that is in jail or leaving"
            if member.status == "Active"
            else "a ban ends only when a jury overturns a verdict: muster explain, muster dispute",
        )
    now, stake = await chain.now(), await chain.vault.account_of(run_id, account)
    if now < member.jailed_until:
        raise NotYet(
            f"{account} is in jail until {format_time(member.jailed_until)}, for "
            f"{format_duration(member.jailed_until - now)} more",
            hint="the same command works then",
        )
    required = await chain.workers.required_stake()
    if stake.active_wei < required:
        raise ConfigError(
            f"{account} stakes {format_tokens(stake.active_wei)} tokens in run {run_id}, a worker "
            f"must hold {format_tokens(required)}",
            hint=f"add stake first: {stake_command(run_id, required - stake.active_wei)}",
        )
    await require_steady(chain, run_id)
    terms, number = await terms_of_run(chain, run_id)
    risks = (f"risk    {line}" for line in of_worker(run_id, terms, stake))
    return number, "\n".join([f"signs   run {run_id}'s terms {number}", *risks])
