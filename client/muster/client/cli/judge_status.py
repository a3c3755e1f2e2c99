"""`muster validator status` and `muster juror status`: how a judge stands, from the chain alone."""

import asyncio
from pathlib import Path
from typing import Any

import click

from muster.chain import BatchStatus, BatchView, Chain, ChainView, RunView, StakeView, read_view
from muster.client.cli.options import FILE, account_of, endpoint, looking_options, run_option
from muster.client.cli.printing import print_result
from muster.client.disputes.cases import count, phase_of
from muster.client.preflight import coins_of, find_run, gas_money
from muster.client.quantities import format_coins, format_time, format_tokens
from muster.protocol.ids import Address, RunId, to_address
from muster.protocol.jury import BENCH
from muster.protocol.schedule import Timing, called_by_age, timeout_of

# Validators


@click.command("status")
@run_option
@click.option("--validator", metavar="ADDRESS", help="The validator's address.")
@click.option("--keystore", type=FILE, help="The validator's keystore; it is not opened.")
@looking_options
def validator_status(
    validator: str | None, keystore: Path | None, as_json: bool, **options: Any
) -> None:
    """Show how a validator stands: its seat, stake and gas money, and the batches to judge.

    \b
    Example:
      muster validator status --run 1 --keystore validator.json
    """
    account = to_address(account_of(validator, keystore, "validator"))
    found = asyncio.run(_validator_status(account, options))
    print_result(found, as_json, _validator_facts(found))


async def _validator_status(account: Address, options: dict[str, Any]) -> dict[str, Any]:
    from muster.client.validator.calls import COMMITTED_SHARE, GAS_SHARE

    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        run, now = find_run(view, options["run"]), await chain.now()
        required = await chain.runs.required_validator_stake()
        deadline_s = await chain.ledger.outcome_deadline()
        gas_wei = await coins_of(chain, account)
        one_wei = (await gas_money(chain, "show and post")).wei
    batches = [batch for batch in view.batches.values() if batch.run_id == run.run_id]
    waiting = [each for each in batches if _is_open(each, now, deadline_s)]
    return {
        "validator": account,
        "run": run.run_id,
        "seated": account in run.validators,
        "invited": account in run.invited,
        "seats": len(run.validators),
        **_stake_values(view.stake(run.run_id, account), required, now),
        "gas_wei": str(gas_wei),
        "gas_wanted_wei": str(int(one_wei / (GAS_SHARE * COMMITTED_SHARE))),
        "signed": sum(bool(run.seats.get(account, 0) & batch.signers) for batch in batches),
        "waiting": len(waiting),
        "called": [
            {"batch": each.batch_id, "due_at": each.due_at(deadline_s)}
            for each in waiting
            if _is_called(each, run, account, now, deadline_s)
        ],
    }


def _is_open(batch: BatchView, now: int, deadline_s: int) -> bool:
    """Return whether validators can still judge a batch."""
    is_unjudged = batch.status is BatchStatus.COMMITTED and not batch.is_void
    return is_unjudged and now < batch.due_at(deadline_s)


def _is_called(batch: BatchView, run: RunView, account: Address, now: int, deadline_s: int) -> bool:
    """Return whether a batch's age calls an account; objections call more, off chain."""
    from muster.client.validator.calls import order_of

    timing = Timing(batch.committed_at, deadline_s, timeout_of(deadline_s))
    return account in called_by_age(order_of(batch, run), run.quorum_of(batch), timing, now)


def _validator_facts(found: dict[str, Any]) -> dict[str, Any]:
    seat = "seated" if found["seated"] else "no seat (invited)" if found["invited"] else "no seat"
    join = f"muster validator join --run {found['run']} --keystore FILE"
    gas, wanted = (int(found[name]) for name in ("gas_wei", "gas_wanted_wei"))
    return {
        "validator": f"{found['validator']}, {seat} in run {found['run']} of "
        f"{count(found['seats'], 'validator')}",
        "stake": _stake_words(found),
        "back": _back_words(
            found, found["run"], found["seated"], join if found["invited"] else None
        ),
        "gas": f"{format_coins(gas)} of the chain's coin"
        + ("" if gas >= wanted else f", too little: hold {format_coins(wanted)}"),
        "batches": f"signed {found['signed']}; {found['waiting']} wait for outcomes",
        "called": [
            f"batch {each['batch']}, until {format_time(each['due_at'])}"
            for each in found["called"]
        ],
        "slashed": _slashed_words(found),
    }


# Jurors


@click.command("status")
@click.option("--juror", metavar="ADDRESS", help="The juror's address.")
@click.option("--keystore", type=FILE, help="The juror's keystore; it is not opened.")
@looking_options
def juror_status(juror: str | None, keystore: Path | None, as_json: bool, **options: Any) -> None:
    """Show how a juror stands: its stake, its open cases, what it voted, earned and lost.

    \b
    Example:
      muster juror status --keystore juror.json
    """
    found = asyncio.run(_juror_status(to_address(account_of(juror, keystore, "juror")), options))
    print_result(found, as_json, _juror_facts(found))


async def _juror_status(account: Address, options: dict[str, Any]) -> dict[str, Any]:
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        now, terms = await chain.now(), await chain.court.terms()
        required = await chain.jurors.required_stake()
    drawn = [case for case in view.cases.values() if account in case.jurors]
    return {
        "juror": account,
        "on_the_bench": account in view.jurors(),
        "bench": len(view.jurors()),
        **_stake_values(view.stake(RunId(BENCH), account), required, now),
        "drawn": len(drawn),
        "voted": sum(account in case.votes for case in drawn),
        "absent": sum(case.closed and account not in case.votes for case in drawn),
        "earned_wei": str(sum(case.fee_wei for case in drawn if account in case.collected)),
        "open": [
            {"case": f"0x{case.case_id.hex()}", "phase": phase_of(case, terms, now)[0]}
            for case in drawn
            if not case.closed
        ],
    }


def _juror_facts(found: dict[str, Any]) -> dict[str, Any]:
    is_seated, join = found["on_the_bench"], "muster juror join --keystore FILE"
    return {
        "juror": f"{found['juror']}, {'' if is_seated else 'not '}on the bench of {found['bench']}",
        "stake": _stake_words(found),
        "back": _back_words(found, BENCH, is_seated, join),
        "cases": f"drawn for {found['drawn']}, voted in {found['voted']}, absent in "
        f"{found['absent']}",
        "earned": f"{format_tokens(int(found['earned_wei']))} tokens",
        "slashed": _slashed_words(found),
        "open": [f"{case['case']}  {case['phase']}" for case in found["open"]],
    }


# Stake of both


def _stake_values(stake: StakeView, required_wei: int, now: int) -> dict[str, Any]:
    return {
        "required_wei": str(required_wei),
        "active_wei": str(stake.active_wei),
        "unbonding_wei": str(stake.unbonding_wei),
        "withdrawable_at": stake.withdrawable_at if stake.unbonding_wei else None,
        "withdrawable": bool(stake.unbonding_wei) and now >= stake.withdrawable_at,
        "slashed_wei": str(stake.slashed_wei),
    }


def _stake_words(found: dict[str, Any]) -> str:
    active, required, unbonding = (
        format_tokens(int(found[f"{name}_wei"])) for name in ("active", "required", "unbonding")
    )
    words = f"{active} tokens, {required} required"
    if found["withdrawable_at"] is None:
        return words
    return f"{words}; {unbonding} unbonding until {format_time(found['withdrawable_at'])}"


def _slashed_words(found: dict[str, Any]) -> str | None:
    slashed = int(found["slashed_wei"])
    return f"{format_tokens(slashed)} tokens" if slashed else None


def _back_words(found: dict[str, Any], run_id: int, is_seated: bool, join: str | None) -> list[str]:
    """Return how stake is taken back; without a place, also how `join` gets one, if it may."""
    withdraw = withdraw_command(run_id)
    lines = [f"{withdraw} withdraws what unbonded"] if found["withdrawable"] else []
    if not is_seated and int(found["active_wei"]):
        lines += [f"{join} stakes what is missing for a place, or"] if join else []
        lines.append(f"{withdraw} takes it back, one unbonding period later")
    return lines


def withdraw_command(run_id: int) -> str:
    """Return the command that takes stake back."""
    return f"muster unstake --run {run_id} --keystore FILE"
