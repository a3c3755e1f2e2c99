"""`muster unstake` and `muster worker rejoin`: how stake comes back, and how a worker does.

Stake that is asked for unbonds for a while, during which earlier work can still be slashed; then a
second call withdraws it. The vault has one date for what unbonds of one run: asking for more moves
it. Nothing else holds stake back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.options import (
    chain_options,
    endpoint,
    json_option,
    key_options,
    open_keystore,
    yes_option,
)
from muster.client.printing import print_facts, print_json
from muster.client.quantities import format_duration, format_time, format_tokens, parse_tokens
from muster.protocol.errors import ConfigError, NotYet
from muster.protocol.ids import Address, RunId
from muster.protocol.jury import BENCH

if TYPE_CHECKING:
    from muster.chain import Chain, Member, Receipt, StakeAccount

_LEAVES = ("Active", "Jailed")
"""Statuses from which a worker exits."""
run_option = click.option(
    "--run",
    type=click.IntRange(min=0),
    required=True,
    help="The run that it is staked for; 0 is the jurors' bench.",
)


@dataclass(frozen=True, slots=True)
class Leaving:
    """An account that wants stake of a run back, as it stands."""

    account: Address
    """Whose stake it is."""
    run_id: RunId
    """The run that it is for."""
    member: Member
    """What it is there, when it is a worker."""
    stake: StakeAccount
    """Its stake there."""
    required_wei: int
    """Active stake that its role takes; 0 without one."""
    unbonding_s: int
    """Seconds from asking to having."""
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
        """Return how much starts to unbond; raises ConfigError when there is not that much."""
        active = self.stake.active_wei
        if active == 0:
            raise ConfigError(
                f"{self.account} has no active stake in run {self.run_id}",
                hint="is it the right keystore and run? muster worker status shows a worker's runs",
            )
        if asked_wei is not None and asked_wei > active:
            raise ConfigError(
                f"{format_tokens(asked_wei)} tokens are asked for, "
                f"{format_tokens(active)} are staked for run {self.run_id}",
                hint="--all takes everything",
            )
        return active if asked_wei is None else asked_wei

    def exits(self, amount_wei: int) -> bool:
        """Whether taking so much out means that a worker leaves the run, or a validator its
        seat.
        """
        everything = amount_wei == self.stake.active_wei
        return everything and (self.is_validator or self.member.status in _LEAVES)

    def describe(self, amount_wei: int) -> str:
        """Return when how much comes back, and what follows."""
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


async def leaving(chain: Chain, account: Address, run_id: RunId) -> Leaving:
    """Return how an account's stake in a run stands; raises ConfigError for a node's key."""
    from muster.client.preflight import require_cold

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
            f"{account} is on the bench", hint="first: muster juror leave; it unbonds the stake"
        )
    return Leaving(
        account=account,
        run_id=run_id,
        member=member,
        stake=await chain.vault.account_of(run_id, account),
        required_wei=required,
        unbonding_s=await chain.vault.unbonding_period(),
        is_validator=is_validator,
        now=await chain.now(),
    )


async def unbond(chain: Chain, state: Leaving, amount_wei: int) -> Receipt:
    """Start to take stake out, and return the receipt; all of a worker's or a validator's means
    that it leaves.
    """
    if not state.exits(amount_wei):
        return await chain.vault.request_unbond(state.run_id, amount_wei)
    if state.is_validator:
        return await chain.runs.leave_seat(state.run_id)
    return await chain.workers.exit(state.run_id)


async def come_back(chain: Chain, account: Address, run_id: RunId) -> Receipt:
    """Make a jailed or leaving worker of a run active again, under the run's present terms; raises
    NotYet or ConfigError when it cannot be.
    """
    from muster.client.preflight import require_member
    from muster.client.stake import require_steady

    member = await require_member(chain, account, run_id)
    if member.status in ("Active", "Banned"):
        raise ConfigError(
            f"{account} is {member.status.lower()} in run {run_id}",
            hint="there is nothing to come back from"
            if member.status == "Active"
            else "a ban ends only when a jury overturns a verdict: muster explain, muster dispute",
        )
    now, active = await chain.now(), await chain.vault.active_stake(run_id, account)
    if now < member.jailed_until:
        raise NotYet(
            f"{account} is in jail until {format_time(member.jailed_until)}, for "
            f"{format_duration(member.jailed_until - now)} more",
            hint="the same command works then",
        )
    required = await chain.workers.required_stake()
    if active < required:
        missing = format_tokens(required - active)
        raise ConfigError(
            f"{account} stakes {format_tokens(active)} tokens in run {run_id}, a worker must hold "
            f"{format_tokens(required)}",
            hint=f"first: muster stake --run {run_id} --keystore FILE --amount {missing}",
        )
    await require_steady(chain, run_id)
    _, terms = await chain.runs.terms_of(run_id)
    return await chain.workers.come_back(run_id, terms)


# Commands


@click.command()
@key_options
@run_option
@click.option("--amount", metavar="TOKENS", help="How much to ask for. [default: everything]")
@click.option("--all", "everything", is_flag=True, help="Ask for the rest, though some unbonds.")
@yes_option
@json_option
@chain_options
def unstake(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Take stake of a run back: a first call asks for it, a second withdraws it when it is due.

    Of a worker or validator that means to leave the run, unless --amount leaves enough. Exit code
    3: not due yet.

    \b
    Examples:
      muster unstake --run 1 --keystore ~/.muster/worker.json           leave; later, withdraw
      muster unstake --run 1 --keystore validator.json --amount 100     spare stake only
    """
    if options["amount"] and options["everything"]:
        raise click.UsageError("--amount and --all exclude each other")
    asyncio.run(_unstake(open_keystore(keystore, password_file).key, options))


async def _unstake(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain

    asked = parse_tokens(options["amount"]) if options["amount"] else None
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        assert chain.account is not None  # connected with a key
        state = await leaving(chain, chain.account, RunId(options["run"]))
        if state.stake.unbonding_wei and asked is None and not options["everything"]:
            state.require_due()
            click.echo(f"withdraws {format_tokens(state.stake.unbonding_wei)} tokens", err=True)
            await _agree(chain, state.account, options)
            receipt = await chain.vault.withdraw(state.run_id)
            action, amount, due = "withdrawn", state.stake.unbonding_wei, state.now
        else:
            amount = state.amount(asked)
            click.echo(state.describe(amount), err=True)
            await _agree(chain, state.account, options)
            receipt = await unbond(chain, state, amount)
            requested = receipt.event("UnbondRequested")
            action, due = "unbonding", int(requested.args["withdrawable_at"])
    facts = {"action": action, "amount_tokens": format_tokens(amount)}
    if options["as_json"]:
        print_json({**facts, "due_at": due, "transaction": receipt.tx_hash})
    else:
        print_facts({**facts, "due": format_time(due), "transaction": receipt.tx_hash})


async def _agree(chain: Chain, account: Address, options: dict[str, Any]) -> None:
    from muster.client.preflight import require_gas

    await require_gas(chain, account, "unstake")
    if not options["yes"]:
        click.confirm("Go on?", abort=True, err=True)


@click.command()
@key_options
@run_option
@json_option
@chain_options
def rejoin(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Work again for a run after jail, or after having started to leave, under its present terms.

    --keystore is the worker's. Stake that unbonds does not count: add what is missing first. Exit
    code 3: not possible yet.

    \b
    Example:
      muster worker rejoin --run 1 --keystore ~/.muster/worker.json
    """
    asyncio.run(_rejoin(open_keystore(keystore, password_file).key, options))


async def _rejoin(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain
    from muster.client.preflight import require_gas, require_worker

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        assert chain.account is not None  # connected with a key
        await require_worker(chain, chain.account)
        await require_gas(chain, chain.account, "rejoin")
        receipt = await come_back(chain, chain.account, RunId(options["run"]))
    back = receipt.event("WorkerReturned")
    facts = {"active_from_block": back.args["active_from"], "transaction": receipt.tx_hash}
    if options["as_json"]:
        print_json(facts)
    else:
        print_facts(facts)
