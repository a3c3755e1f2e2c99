"""Shared by the commands: flags, the keystores and accounts they name, the start of a process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from muster.client.cli.printing import say_sent, tell_sent
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Address, to_address
from muster.settings import Settings, load_settings
from muster.settings.flags import (
    CONFIRMATIONS_HELP,
    FILE as FILE,
    FOLDER as FOLDER,
    ORCHESTRATOR_HELP,
    PASSWORD_HELP as PASSWORD_HELP,
    RELAY_HELP,
    chain_options as chain_options,
    endpoint as endpoint,
    engine_choice as engine_choice,
    orchestrator_option as orchestrator_option,
    relay_option as relay_option,
    together as together,
)
from muster.telemetry import setup_logging
from muster.wallet import Wallet, keystore_address, open_wallet

S = TypeVar("S", bound=Settings)

HOME = Path("~/.muster")
"""Default folder of the keystores that `muster init` writes."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
looking_options = together(json_option, chain_options)
"""Options of commands that only read the chain."""
acting_options = together(yes_option, looking_options)
"""Options of commands that send transactions after a confirmation."""
run_option = click.option("--run", type=click.IntRange(min=1), required=True, help="The run.")


key_options = together(
    click.option("--keystore", type=FILE, required=True, help="Keystore of the signing key."),
    click.option("--password-file", type=FILE, help=PASSWORD_HELP),
)
confirmations_option = click.option(
    "--confirmations", metavar="N|safe|finalized", help=CONFIRMATIONS_HELP
)
room_options = together(
    click.option(
        "--tensor-parallel",
        type=click.IntRange(1, 64),
        metavar="N",
        help="GPUs per model. [default: 1]",
    ),
    click.option(
        "--context",
        type=click.IntRange(2),
        metavar="N",
        help="Longest sample. [default: recipe's]",
    ),
    click.option(
        "--memory-share",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="PART",
        help="Of free memory. [0.9, CPU 0.5]",
    ),
    click.option(
        "--max-rows",
        type=click.IntRange(1),
        metavar="N",
        help="Samples at a time. [default: 256]",
    ),
    click.option(
        "--batch-tokens",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens per step. [default: engine's]",
    ),
)
"""Options that limit the engine's use of the machine."""
devices_option = click.option("--devices", metavar="NAMES", help="An engine each: 0,1 or cpu,cpu.")
node_options = together(
    chain_options,
    key_options,
    click.option("--config", type=FILE, help="TOML file with any of these settings."),
    click.option("--run", type=int, help="The run to take part in."),
    click.option("--orchestrator", metavar="URL", help=ORCHESTRATOR_HELP),
    click.option("--state-dir", type=FOLDER, help="Where the process keeps its state."),
    click.option("--relay", multiple=True, metavar="URL", help=RELAY_HELP),
    click.option("--keep-going", is_flag=True, default=None, help="Stay when the run is over."),
    click.option("--poll-s", type=float, help="Seconds between looks at the chain."),
    confirmations_option,
    engine_choice,
    room_options,
)
"""Options of both workers and validators."""


def open_keystore(keystore: Path, password_file: Path | None, what: str = "keystore") -> Wallet:
    """Return the account of a keystore; the password prompt names it as `what`."""
    return open_wallet(keystore, password_file, what=f"{what} {keystore}")


def agree(question: str, options: Mapping[str, Any], *, is_repeatable: bool = False) -> None:
    """Ask for confirmation unless --yes was given; a refusal ends the command. What is sent from
    now on is told on stderr, as `tell_what_is_sent` does.
    """
    if not options["yes"]:
        click.confirm(question, abort=True, err=True)
    tell_what_is_sent(is_repeatable=is_repeatable)


def tell_what_is_sent(*, is_repeatable: bool) -> None:
    """Tell on stderr what is sent from now on. A failure after it ends with exit code 1, unless the
    command is repeatable: it sends only what is still missing.
    """
    from muster.chain.outgoing import TELL_SENT

    TELL_SENT.set(say_sent if is_repeatable else tell_sent)


def parse_account(text: str) -> Address:
    """Return the account that a text names; raises ConfigError if it names none."""
    try:
        return to_address(text)
    except EncodingError as error:
        raise ConfigError(
            f"{text!r} is no account: {error}", hint="write 0x and 40 hexadecimal digits"
        ) from error


def account_of(address: str | None, keystore: Path | None, role: str) -> str:
    """Return the account whose status is wanted: the given address, or the keystore's account."""
    if (address is None) == (keystore is None):
        raise ConfigError(
            f"exactly one of --{role} and --keystore is needed",
            hint=f"give --{role} ADDRESS or --keystore FILE",
        )

    return address or keystore_address(keystore or Path())


def begin_process(settings: type[S], role: str, options: Mapping[str, Any]) -> tuple[S, Wallet]:
    """Return a process's settings and its account, and set up its log.

    Missing settings are reported before the password is asked for. Environment variables begin
    with MUSTER_ROLE_.
    """
    flags = dict(options)
    file, keystore, password_file = map(flags.pop, ("config", "keystore", "password_file"))
    loaded = load_settings(settings, file=file, flags=flags, env_prefix=f"MUSTER_{role.upper()}_")
    account = open_keystore(keystore, password_file, "node" if role == "worker" else role)
    setup_logging(role)
    return loaded, account
