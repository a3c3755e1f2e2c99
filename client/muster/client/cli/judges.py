"""`muster validator` and `muster juror`: run a judge, and become one.

Every account takes its seat itself: a validator after an invitation by the run's owner, a juror for
the whole network. Both commands first print what the account can lose, and to whom.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import click

from muster.chain import Chain, ChainView, Receipt, WorkerStatus, read_view
from muster.client.cli.judge_status import juror_status, validator_status, withdraw_command
from muster.client.cli.options import (
    FILE,
    FOLDER,
    acting_options,
    agree,
    begin_process,
    chain_options,
    confirmations_option,
    endpoint,
    engine_choice,
    key_options,
    node_options,
    open_keystore,
    relay_option,
    run_option,
)
from muster.client.cli.printing import print_result
from muster.client.cli.trap import trap
from muster.client.preflight import require_cold, require_gas
from muster.client.quantities import format_duration, format_time, format_tokens, parse_tokens
from muster.client.risks import of_juror, of_validator
from muster.client.settings import JurorSettings, ValidatorSettings
from muster.client.stake import (
    added,
    join_bench,
    require_free_of_draws,
    require_steady,
    take_seat,
    terms_of_run,
)
from muster.lifecycle import run_until_stopped
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, RunId
from muster.protocol.jury import BENCH


@click.group()
def validator() -> None:
    """Check rollouts and sign verdicts."""


@validator.command("run")
@node_options
@click.option("--file-patience-s", type=float, help="Wait this long for a missing file.")
@click.option(
    "--checks-everything",
    is_flag=True,
    default=None,
    help="Judge also batches that did not call it.",
)
def validator_run(**options: Any) -> None:
    """Judge the run's batches until stopped; --keystore is the validator's.

    \b
    Example:
      muster validator run --run 1 --keystore validator.json --state-dir validator \\
        --orchestrator http://orchestrator:8600
    """
    settings, account = begin_process(ValidatorSettings, "validator", options)
    from muster.client.validator.process import run_validator

    run_until_stopped(lambda: run_validator(settings, account))


@click.group()
def juror() -> None:
    """Judge disputes of the whole network."""


@juror.command("run")
@engine_choice
@key_options
@chain_options
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--state-dir", type=FOLDER, help="Where the process keeps its state.")
@click.option(
    "--source", multiple=True, metavar="URL", help="Server of work and files; repeatable."
)
@relay_option
@click.option("--poll-s", type=float, help="Seconds between looks at the chain.")
@confirmations_option
def juror_run(**options: Any) -> None:
    """Sit in the cases that draw this account, until stopped; --keystore is the juror's.

    Cases name sources that show their work; --source adds orchestrators that are asked first.

    \b
    Example:
      muster juror run --keystore juror.json --state-dir juror --source http://orchestrator:8600
    """
    settings, account = begin_process(JurorSettings, "juror", options)
    from muster.client.juror.duty import run_juror

    run_until_stopped(lambda: run_juror(settings, account))


amount_option = click.option(
    "--amount", metavar="TOKENS", help="How much to stake. [default: what is missing]"
)


# Validators


@validator.command("join")
@key_options
@run_option
@amount_option
@acting_options
def validator_join(**options: Any) -> None:
    """Take a validator's seat in a run whose owner invited this account.

    Shows what can be lost, stakes for the run, and signs the number of the run's terms.

    \b
    Example:
      muster validator join --run 1 --keystore validator.json
    """
    _send("validator", options, _take_seat)


async def _take_seat(chain: Chain, account: Address, options: dict[str, Any]) -> Receipt:
    run_id = RunId(options["run"])
    terms, number = await terms_of_run(chain, run_id)
    await require_cold(chain, account)
    await _require_invited(chain, run_id, account)
    await require_steady(chain, run_id)
    await require_gas(chain, account, "validator join")
    stake = await chain.vault.account_of(run_id, account)
    required = await chain.runs.required_validator_stake()
    wei = await _amount(chain, account, stake.active_wei, required, options)
    click.echo(
        f"account {account}\n"
        f"signs   for a validator's seat in run {run_id}, under its terms {number} (quorum "
        f"{terms.quorum})\n"
        f"locks   {format_tokens(wei)} tokens, {format_tokens(stake.active_wei)} are staked there "
        "already",
        err=True,
    )
    _say_risk(of_validator(run_id, await chain.court.terms(), added(stake, wei), required))
    agree("Take the seat?", options)
    return await take_seat(chain, run_id, number, wei)


async def _require_invited(chain: Chain, run_id: RunId, account: Address) -> None:
    if await chain.runs.is_validator(run_id, account):
        raise ConfigError(
            f"{account} has a seat in run {run_id} already",
            hint=f"muster validator run --run {run_id} judges; muster stake --run {run_id} adds "
            "stake",
        )
    if not await chain.runs.is_invited(run_id, account):
        raise ConfigError(
            f"{account} is not invited to run {run_id}",
            hint=f"ask the run's owner to invite it: muster run invite {run_id} {account}",
        )
    member = await chain.workers.member_of(run_id, account)
    if member.status is not WorkerStatus.NONE:
        raise ConfigError(
            f"{account} works for run {run_id} ({member.status.lower()})",
            hint="an account cannot judge a run that it works for: use another keystore",
        )


@validator.command("leave")
@key_options
@run_option
@acting_options
def validator_leave(**options: Any) -> None:
    """Give up a validator's seat; all its stake in the run starts to unbond.

    Its signatures can still cost it until the stake is back: `muster unstake` withdraws it then.

    \b
    Example:
      muster validator leave --run 1 --keystore validator.json
    """
    _send("validator", options, _leave_seat)


async def _leave_seat(chain: Chain, account: Address, options: dict[str, Any]) -> Receipt:
    run_id = RunId(options["run"])
    if not await chain.runs.is_validator(run_id, account):
        raise ConfigError(
            f"{account} has no seat in run {run_id}",
            hint="check --run and --keystore; muster run show lists the validators",
        )
    await _say_leaving(chain, run_id, account, "its earlier signatures")
    agree("Give up the seat?", options)
    return await chain.runs.leave_seat(run_id)


# Jurors


@juror.command("join")
@key_options
@amount_option
@acting_options
def juror_join(**options: Any) -> None:
    """Offer an account as a juror of the network, and stake for it.

    Cases that open from now on may draw it; `muster juror run` then votes. Stake above the required
    amount does not change the odds. Exit code 3: the account left the bench, and cases may still
    draw it.

    \b
    Example:
      muster juror join --keystore juror.json
    """
    _send("juror", options, _join_bench)


async def _join_bench(chain: Chain, account: Address, options: dict[str, Any]) -> Receipt:
    if await chain.jurors.is_juror(account):
        raise ConfigError(
            f"{account} is on the bench already", hint="start to vote: muster juror run"
        )
    await require_cold(chain, account)
    await require_free_of_draws(chain, account)
    await require_gas(chain, account, "juror join")
    stake = await chain.vault.account_of(RunId(BENCH), account)
    required = await chain.jurors.required_stake()
    wei = await _amount(chain, account, stake.active_wei, required, options)
    terms = await chain.court.terms()
    click.echo(
        f"account {account}\n"
        "signs   to judge cases of any run that it never validated for\n"
        f"locks   {format_tokens(wei)} tokens, {format_tokens(stake.active_wei)} are staked there "
        "already\n"
        f"earns   {format_tokens(terms.juror_fee)} tokens at most for each ruling that "
        "prevails",
        err=True,
    )
    _say_risk(of_juror(terms, added(stake, wei), required))
    agree("Join the bench?", options)
    return await join_bench(chain, wei)


@juror.command("leave")
@key_options
@acting_options
def juror_leave(**options: Any) -> None:
    """Leave the network's bench; all stake on it starts to unbond.

    Cases that are open may still draw the account, so keep `muster juror run` up until they are
    closed; `muster juror status` says when that is.

    \b
    Example:
      muster juror leave --keystore juror.json
    """
    _send("juror", options, _leave_bench)


async def _leave_bench(chain: Chain, account: Address, options: dict[str, Any]) -> Receipt:
    if not await chain.jurors.is_juror(account):
        raise ConfigError(
            f"{account} is not on the bench", hint="give the juror's keystore with --keystore"
        )
    await _say_leaving(chain, RunId(BENCH), account, "its absence from a case")
    agree("Leave the bench?", options)
    return await chain.jurors.leave()


LOOKS_AT = 50
"""Places at which one transaction of `shorten` looks: at most about 3 million gas."""


@juror.command("shorten")
@key_options
@acting_options
def juror_shorten(**options: Any) -> None:
    """Give up empty places of the network's bench, so that draws find whole juries.

    Jurors that went away left empty places, and a draw looks at 512 places only. Anyone may shorten
    the bench; no open case changes. First, jurors at its end move into empty places. What they left
    can be given up once no open case can draw them: run the command again then.

    \b
    Example:
      muster juror shorten --keystore juror.json
    """
    _send("juror", options, _shorten_bench)


async def _shorten_bench(chain: Chain, account: Address, options: dict[str, Any]) -> Receipt:
    view = await read_view(chain, ChainView())
    places, held = len(view.bench), len(view.jurors())
    if places == held:
        raise ConfigError(f"the bench has no empty place: {places} places, {held} jurors")
    await require_gas(chain, account, "juror shorten")
    click.echo(f"bench   {held} jurors on {places} places", err=True)
    agree("Shorten the bench?", options)
    return await chain.jurors.shorten(LOOKS_AT)


# Shared by both


def _send(
    role: str,
    options: dict[str, Any],
    act: Callable[[Chain, Address, dict[str, Any]], Awaitable[Receipt]],
) -> None:
    """Send a step's transaction with the keystore's key, and print its hash."""
    account = open_keystore(options["keystore"], options["password_file"], role)

    async def send() -> Receipt:
        async with await Chain.connect(*endpoint(options), key=account.key) as chain:
            return await act(chain, account.address, options)

    tx_hash = asyncio.run(send()).tx_hash
    print_result({"account": account.address, "transaction": tx_hash}, options["as_json"], tx_hash)


async def _amount(
    chain: Chain,
    account: Address,
    active_wei: int,
    required_wei: int,
    options: dict[str, Any],
) -> int:
    """Return the amount to stake; raises ConfigError if it is too low or more than the balance."""
    missing = max(required_wei - active_wei, 0)
    wei = parse_tokens(options["amount"]) if options["amount"] else missing
    if wei < missing:
        raise ConfigError(
            f"{format_tokens(wei)} tokens are too few: {format_tokens(missing)} are missing",
            hint="leave out --amount to stake just what is missing",
        )
    held = await chain.token.balance_of(account)
    if held < wei:
        raise ConfigError(
            f"the wallet holds {format_tokens(held)} tokens, staking takes {format_tokens(wei)}",
            hint=f"send tokens to {account}; on a development chain: muster devnet fund KEYSTORE",
        )
    return wei


async def _say_leaving(chain: Chain, run_id: RunId, account: Address, fault: str) -> None:
    """Say when the stake is back, and for what it can be slashed until then."""
    active = await chain.vault.active_stake(run_id, account)
    period = await chain.vault.unbonding_period()
    back = format_time(await chain.now() + period)
    click.echo(
        f"account {account}\n"
        f"unbonds {format_tokens(active)} tokens\n"
        f"back    from {back}, in {format_duration(period)}; until then {fault} can "
        "still be slashed\n"
        f"then    {withdraw_command(run_id)} withdraws it: nothing does by itself",
        err=True,
    )


def _say_risk(lines: list[str]) -> None:
    for line in lines:
        click.echo(f"risk    {line}", err=True)


validator.add_command(trap)
validator.add_command(validator_status)
juror.add_command(juror_status)
