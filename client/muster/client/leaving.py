"""`muster unstake` and `muster worker rejoin`: how stake comes back, and how a worker does.

Stake that is asked for unbonds for a while, during which earlier work can still be slashed; then a
second call withdraws it. The vault has one date for all unbonding stake: asking for more moves it.
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

if TYPE_CHECKING:
    from muster.chain import Chain, Receipt, StakeAccount, WorkerAccount

_LEAVES = ("Active", "Jailed")
"""Statuses from which a worker exits."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """An account that wants stake back, as it stands."""

    account: Address
    """Whose stake it is."""
    worker: WorkerAccount
    """Its record; without a number when it is no worker."""
    stake: StakeAccount
    """Its stake."""
    required_wei: int
    """Active stake a worker must hold."""
    unbonding_s: int
    """Seconds from asking to having."""
    seats: tuple[RunId, ...]
    """Runs it validates for."""
    now: int
    """The chain's time."""

    @property
    def is_due(self) -> bool:
        """Whether unbonding stake can be withdrawn now."""
        return self.stake.unbonding_wei > 0 and self.now >= self.withdrawable_at

    @property
    def withdrawable_at(self) -> int:
        """From when unbonding stake can be withdrawn, as far as it is known now."""
        stake = self.stake
        latest = stake.withdrawable_at + self.unbonding_s
        if stake.open_cases:
            return latest
        return min(max(stake.withdrawable_at, stake.held_until), latest)

    def holds(self) -> str:
        """Return what holds unbonding stake back beyond its date; empty when nothing does."""
        stake, parts = self.stake, []
        if stake.open_cases:
            cases = "case" if stake.open_cases == 1 else "cases"
            parts.append(f"{stake.open_cases} open {cases} (muster dispute list)")
        if stake.held_until > max(self.now, stake.withdrawable_at):
            parts.append(f"work in flight until {format_time(stake.held_until)}")
        return " and ".join(parts)

    def require_due(self) -> None:
        """Raise NotYet when the unbonding stake cannot be withdrawn."""
        if self.is_due:
            return
        left = format_duration(self.withdrawable_at - self.now)
        held = f"; it is held back by {self.holds()}" if self.holds() else ""
        raise NotYet(
            f"{format_tokens(self.stake.unbonding_wei)} tokens can be withdrawn from "
            f"{format_time(self.withdrawable_at)}, in {left}{held}",
            hint="the same command withdraws them then; --amount or --all asks for more",
        )

    def amount(self, asked_wei: int | None) -> int:
        """Return how much starts to unbond; raises ConfigError when there is not that much."""
        active = self.stake.active_wei
        if active == 0:
            raise ConfigError(
                f"{self.account} has no active stake",
                hint="is it the right keystore? The worker's or validator's own is needed",
            )
        if asked_wei is not None and asked_wei > active:
            raise ConfigError(
                f"{format_tokens(asked_wei)} tokens are asked for, "
                f"{format_tokens(active)} are staked",
                hint="--all takes everything",
            )
        return active if asked_wei is None else asked_wei

    def exits(self, amount_wei: int) -> bool:
        """Whether taking so much out means that the worker leaves."""
        return self.worker.status in _LEAVES and amount_wei == self.stake.active_wei

    def describe(self, amount_wei: int) -> str:
        """Return when how much comes back, and what follows."""
        active = format_tokens(self.stake.active_wei)
        lines = [
            f"account  {self.account}",
            f"unbonds  {format_tokens(amount_wei)} of {active} tokens",
            f"back     from {format_time(self.now + self.unbonding_s)}, in "
            f"{format_duration(self.unbonding_s)}; until then earlier work can still be slashed, "
            "and open cases hold it back",
        ]
        if self.stake.unbonding_wei:
            lines.append(
                f"note     {format_tokens(self.stake.unbonding_wei)} tokens that unbond already "
                "wait until then too"
            )
        if self.exits(amount_wei):
            lines.append("worker   leaves: no more tickets. Earned rewards stay claimable")
        elif self.worker.worker_id and self.stake.active_wei - amount_wei < self.required_wei:
            lines.append(
                f"worker   is jailed: it must hold {format_tokens(self.required_wei)} tokens"
            )
        if self.seats:
            runs = ", ".join(map(str, self.seats))
            lines.append(f"seats    of run {runs} can be taken away when too little is staked")
        return "\n".join(lines)


async def leaving(chain: Chain, account: Address) -> Leaving:
    """Return how an account's stake stands; raises ConfigError for a node's key."""
    from muster.client.preflight import require_cold

    await require_cold(chain, account)
    runs = [RunId(number + 1) for number in range(await chain.runs.run_count())]
    seated = await asyncio.gather(*(chain.runs.is_validator(run, account) for run in runs))
    return Leaving(
        account=account,
        worker=await chain.workers.worker_of(account),
        stake=await chain.vault.account_of(account),
        required_wei=await chain.workers.required_stake(),
        unbonding_s=await chain.vault.unbonding_period(),
        seats=tuple(run for run, is_seated in zip(runs, seated, strict=True) if is_seated),
        now=await chain.now(),
    )


async def unbond(chain: Chain, state: Leaving, amount_wei: int) -> Receipt:
    """Start to take stake out, and return the receipt; all of a worker's means that it leaves."""
    if state.exits(amount_wei):
        return await chain.workers.exit()
    return await chain.vault.request_unbond(amount_wei)


async def come_back(chain: Chain, account: Address) -> Receipt:
    """Make a jailed or leaving worker active again; raises NotYet or ConfigError when it cannot."""
    from muster.client.preflight import require_worker

    record = await require_worker(chain, account)
    if record.status in ("Active", "Banned"):
        raise ConfigError(
            f"{account} is {record.status.lower()}",
            hint="there is nothing to come back from"
            if record.status == "Active"
            else "a ban ends only when a jury overturns a verdict: muster explain, muster dispute",
        )
    now, active = await chain.now(), await chain.vault.active_stake(account)
    if now < record.jailed_until:
        raise NotYet(
            f"{account} is in jail until {format_time(record.jailed_until)}, for "
            f"{format_duration(record.jailed_until - now)} more",
            hint="the same command works then",
        )
    required = await chain.workers.required_stake()
    if active < required:
        raise ConfigError(
            f"{account} stakes {format_tokens(active)} tokens, a worker must hold "
            f"{format_tokens(required)}",
            hint=f"first: muster stake --keystore FILE --amount {format_tokens(required - active)}",
        )
    jailed = record.status == "Jailed"
    return await (chain.workers.unjail() if jailed else chain.workers.rejoin())


# Commands


@click.command()
@key_options
@click.option("--amount", metavar="TOKENS", help="How much to ask for. [default: everything]")
@click.option("--all", "everything", is_flag=True, help="Ask for the rest, though some unbonds.")
@yes_option
@json_option
@chain_options
def unstake(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Take stake back: a first call asks for it, a second one withdraws it when it is due.

    Of a worker that means to leave, unless --amount leaves enough. Exit code 3: not due yet.

    \b
    Examples:
      muster unstake --keystore ~/.muster/worker.json               leave; later, withdraw
      muster unstake --keystore validator.json --amount 100         spare stake only
    """
    if options["amount"] and options["everything"]:
        raise click.UsageError("--amount and --all exclude each other")
    asyncio.run(_unstake(open_keystore(keystore, password_file).key, options))


async def _unstake(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain

    asked = parse_tokens(options["amount"]) if options["amount"] else None
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        assert chain.account is not None  # connected with a key
        state = await leaving(chain, chain.account)
        if state.stake.unbonding_wei and asked is None and not options["everything"]:
            state.require_due()
            click.echo(f"withdraws {format_tokens(state.stake.unbonding_wei)} tokens", err=True)
            await _agree(chain, state.account, options)
            receipt = await chain.vault.withdraw()
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
@json_option
@chain_options
def rejoin(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Work again after jail, or after having started to leave. Exit code 3: not possible yet.

    --keystore is the worker's. Stake that unbonds does not count: add what is missing first.

    \b
    Example:
      muster worker rejoin --keystore ~/.muster/worker.json
    """
    asyncio.run(_rejoin(open_keystore(keystore, password_file).key, options))


async def _rejoin(key: bytes, options: dict[str, Any]) -> None:
    from muster.chain import Chain
    from muster.client.preflight import require_gas, require_worker

    async with await Chain.connect(*endpoint(options), key=key) as chain:
        assert chain.account is not None  # connected with a key
        await require_worker(chain, chain.account)
        await require_gas(chain, chain.account, "rejoin")
        receipt = await come_back(chain, chain.account)
    back = next(e for e in receipt.events if e.name in ("WorkerUnjailed", "WorkerRejoined"))
    facts = {"active_from_block": back.args["active_from"], "transaction": receipt.tx_hash}
    if options["as_json"]:
        print_json(facts)
    else:
        print_facts(facts)
