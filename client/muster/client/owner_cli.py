"""The commands of a run's owner: fund, pause, resume, close, reclaim, change, rotate, and others.

Each says what becomes of the run, when, and what the gas costs; asks once; sends. With --dry-run it
sends nothing, and needs no password.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.client.options import (
    FILE,
    chain_options,
    endpoint,
    json_option,
    key_options,
    open_keystore,
    yes_option,
)
from muster.client.printing import print_facts, print_json
from muster.protocol.errors import ConfigError

if TYPE_CHECKING:
    from muster.chain import Chain, Receipt
    from muster.client.owning import Act, Subject
    from muster.client.preflight import GasMoney
    from muster.protocol.ids import Address

F = TypeVar("F", bound=Callable[..., Any])
Plan = Callable[["Subject"], Awaitable["Act"]]
PPM = click.IntRange(0, 10**6)


def owner_options(command: F) -> F:
    """Add RUN and what every command of this module takes."""
    for add in (
        chain_options,
        json_option,
        yes_option,
        click.option("--dry-run", is_flag=True, help="Say what it does and costs; send nothing."),
        key_options,
        click.argument("run", type=click.IntRange(min=1)),
    ):
        command = add(command)
    return command


@click.command()
@owner_options
@click.argument("amount", metavar="TOKENS")
def fund(amount: str, **options: Any) -> None:
    """Pay tokens into a run, of which its workers are paid. Anyone may.

    \b
    Example:
      muster run fund 1 500 --keystore owner.json
    """
    from muster.client import owning
    from muster.client.quantities import parse_tokens

    wei = parse_tokens(amount)
    _act("fund", options, lambda subject: owning.fund(subject, wei))


@click.command()
@click.option(
    "--slashing",
    "evidence",
    type=FILE,
    help="Stop slashing instead; FILE says why.",
)
@owner_options
def pause(evidence: Path | None, **options: Any) -> None:
    """Take no more submissions until `muster run resume`. The owner only.

    With --slashing it is slashing that stops, for a time that the network fixed; the orchestrator
    and the validators may do that, too. The hash of FILE goes on chain: keep the file.

    \b
    Examples:
      muster run pause 1 --keystore owner.json --dry-run
      muster run pause 1 --keystore owner.json --slashing what-happened.txt
    """
    from muster.client import owning
    from muster.protocol.encoding import keccak

    if evidence is None:
        _act("pause", options, owning.pause)
        return
    digest = keccak(evidence.read_bytes())
    _act("pause", options, lambda subject: owning.pause_slashing(subject, digest))


@click.command()
@owner_options
def resume(**options: Any) -> None:
    """Take submissions again after `muster run pause`. The owner only.

    \b
    Example:
      muster run resume 1 --keystore owner.json
    """
    from muster.client import owning

    _act("resume", options, owning.resume)


@click.command()
@owner_options
def close(**options: Any) -> None:
    """End a run, for good. The owner only.

    Workers claim what they earned for some time; what is left is the owner's: `muster run reclaim`.

    \b
    Example:
      muster run close 1 --keystore owner.json --dry-run
    """
    from muster.client import owning

    _act("close", options, owning.close)


@click.command()
@owner_options
def reclaim(**options: Any) -> None:
    """Pay what is left of a closed run to its owner. Exit code 3: not yet. Anyone may.

    What is set aside for workers follows when their time to claim is over.

    \b
    Example:
      muster run reclaim 1 --keystore owner.json
    """
    from muster.client import owning

    _act("reclaim", options, owning.reclaim)


@click.command()
@owner_options
def recover(**options: Any) -> None:
    """Free what was set aside for outcomes that were not accepted. Anyone may.

    The run's workers are paid of it again; of a closed run `muster run reclaim` pays it out.

    \b
    Example:
      muster run recover 1 --keystore owner.json
    """
    from muster.client import owning

    _act("recover", options, owning.recover)


@click.command()
@click.option("--price", metavar="TOKENS", help="Pay per unit; half to twice of what it is now.")
@click.option("--fraud-ppm", type=PPM, metavar="N", help="First fraud, in millionths.")
@click.option("--exact-fraud-ppm", type=PPM, metavar="N", help="Exact fraud, in millionths.")
@click.option("--quorum", type=click.IntRange(min=1), help="Validators that must agree.")
@click.option("--apply", "applies", is_flag=True, help="Make announced terms so; anyone, once due.")
@click.option("--cancel", "cancels", is_flag=True, help="Drop announced terms.")
@owner_options
def change(
    price: str | None,
    fraud_ppm: int | None,
    exact_fraud_ppm: int | None,
    quorum: int | None,
    applies: bool,
    cancels: bool,
    **options: Any,
) -> None:
    """Announce other terms, which hold after a delay that the network fixed. The owner only.

    \b
    Examples:
      muster run change 1 --keystore owner.json --price 0.002 --dry-run
      muster run change 1 --keystore owner.json --apply
    """
    from muster.client import owning
    from muster.client.quantities import parse_tokens

    given: dict[str, int | None] = {
        "price_per_unit": parse_tokens(price) if price else None,
        "fraud_ppm": fraud_ppm,
        "exact_fraud_ppm": exact_fraud_ppm,
        "quorum": quorum,
    }
    if applies + cancels + any(value is not None for value in given.values()) > 1:
        raise click.UsageError("--apply, --cancel and other terms exclude each other")
    if applies:
        _act("apply change", options, owning.apply_change)
    elif cancels:
        _act("cancel change", options, owning.cancel_change)
    else:
        _act("change", options, lambda subject: owning.propose_change(subject, given))


@click.command()
@click.option("--trainer", metavar="ADDR", help="The account that publishes from now on.")
@click.option("--orchestrator", metavar="ADDR", help="The account that commits from now on.")
@owner_options
def rotate(trainer: str | None, orchestrator: str | None, **options: Any) -> None:
    """Replace the run's trainer or its orchestrator, at once. The owner only.

    \b
    Example:
      muster run rotate 1 --keystore owner.json --trainer 0x…
    """
    from muster.client import owning

    if (trainer is None) == (orchestrator is None):
        raise click.UsageError("one of --trainer and --orchestrator is needed")
    if trainer:
        fresh = _address(trainer)
        _act("rotate trainer", options, lambda subject: owning.rotate_trainer(subject, fresh))
    elif orchestrator:
        fresh = _address(orchestrator)
        _act("rotate orchestrator", options, lambda s: owning.rotate_orchestrator(s, fresh))


@click.command()
@owner_options
@click.argument("validator", metavar="ADDR")
@click.option("--withdraw", "cancels", is_flag=True, help="Take the invitation back.")
def invite(validator: str, cancels: bool, **options: Any) -> None:
    """Invite an account to validate; it takes its seat itself. The owner only.

    The account's own command is `muster validator join`.

    \b
    Example:
      muster run invite 1 0x… --keystore owner.json
    """
    from muster.client import owning

    account = _address(validator)
    _act("invite", options, lambda subject: owning.invite(subject, account, not cancels))


@click.command()
@owner_options
@click.argument("validator", metavar="ADDR")
def dismiss(validator: str, **options: Any) -> None:
    """Take a validator's seat. Its stake stays its own, to unbond when it likes. The owner only.

    \b
    Example:
      muster run dismiss 1 0x… --keystore owner.json
    """
    from muster.client import owning

    account = _address(validator)
    _act("dismiss", options, lambda subject: owning.dismiss(subject, account))


def _address(text: str) -> Address:
    from muster.protocol.errors import EncodingError
    from muster.protocol.ids import to_address

    try:
        return to_address(text)
    except EncodingError as error:
        raise ConfigError(f"{text!r} is no account: {error}", hint="0x and 40 digits") from error


# From a plan to what is printed


def _act(name: str, options: dict[str, Any], plan: Plan) -> None:
    import asyncio

    asyncio.run(_carry_out(name, options, plan))


async def _carry_out(name: str, options: dict[str, Any], plan: Plan) -> None:
    from muster.chain import Chain, ChainView, read_view
    from muster.client.owning import Subject
    from muster.client.preflight import find_run, require_gas
    from muster.wallet import keystore_address

    account, key = keystore_address(options["keystore"]), None
    if not options["dry_run"]:
        key = open_keystore(options["keystore"], options["password_file"]).key
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        view = await read_view(chain, ChainView())
        run = find_run(view, options["run"])
        now = await chain.now()
        act = await plan(Subject(chain, view, run, account, now))
        gas, money = await _rehearse(chain, account, act)
        words = _words(act, now, gas, money)
        report = {"run": options["run"], "action": name, **act.values}
        if options["dry_run"]:
            report |= {"effective_at": now + act.delay_s, "gas": gas, "fee_wei": str(money.wei)}
            _print(report, words, options["as_json"])
            click.echo("nothing was sent", err=True)
            return
        await require_gas(chain, account, f"run {name}", money)
        click.echo("\n".join(lines_of(words)), err=True)
        if not options["yes"]:
            click.confirm("Go on?", abort=True, err=True)
        receipts = [await step.send(chain) for step in act.steps]
    report |= {"effective_at": _mined_at(receipts) + act.delay_s}
    report |= {"gas": sum(receipt.gas_used for receipt in receipts)}
    hashes = [receipt.tx_hash for receipt in receipts]
    _print(report | {"transactions": hashes}, {"transactions": hashes}, options["as_json"])


async def _rehearse(chain: Chain, account: Address, act: Act) -> tuple[int, GasMoney]:
    """Return the gas of an act and what it costs now; raises ContractRevert for a refusal."""
    from muster.client.preflight import money_for

    rehearsal, gas = chain.rehearsed_by(account), 0
    for step in act.steps:
        gas += step.gas if step.gas is not None else (await step.send(rehearsal)).gas_used
    return gas, await money_for(chain, gas, sum(step.size_bytes for step in act.steps))


def _words(act: Act, now: int, gas: int, money: GasMoney) -> dict[str, Any]:
    from muster.client.quantities import format_duration, format_time

    effect = "at once"
    if act.delay_s:
        effect = f"from {format_time(now + act.delay_s)}, in {format_duration(act.delay_s)}"
    calls = ", ".join(dict.fromkeys(step.call for step in act.steps))
    cost = f"about {gas:,} for {calls}: {money} of the chain's coin"
    return {**act.facts, "takes effect": effect, "gas": cost}


def lines_of(words: Mapping[str, Any]) -> list[str]:
    """Return names and values for a screen of 80 columns; nothing for a value that is empty."""
    import textwrap

    width = max(map(len, words))
    return [
        line
        for name, value in words.items()
        if value
        for line in textwrap.wrap(
            value,
            80,
            initial_indent=f"{name:{width}}  ",
            subsequent_indent=" " * (width + 2),
            break_long_words=False,
        )
    ]


def _print(report: dict[str, Any], words: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    elif "transactions" in words:
        print_facts(words)
    else:
        click.echo("\n".join(lines_of(words)))


def _mined_at(receipts: list[Receipt]) -> int:
    """Return the time of the last block; every act ends with an event."""
    return receipts[-1].events[-1].block_timestamp
