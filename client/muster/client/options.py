"""What the commands share: flags, the chain they mean, the keystores they open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.settings.options import CONFIRMATIONS_HELP, ORCHESTRATOR_HELP, RELAY_HELP
from muster.settings.options import FILE as FILE
from muster.settings.options import FOLDER as FOLDER
from muster.settings.options import PASSWORD_HELP as PASSWORD_HELP
from muster.settings.options import chain_options as chain_options
from muster.settings.options import endpoint as endpoint
from muster.settings.options import orchestrator_option as orchestrator_option
from muster.settings.options import relay_option as relay_option

if TYPE_CHECKING:
    from muster.wallet import Wallet

F = TypeVar("F", bound=Callable[..., Any])

HOME = Path("~/.muster")
"""Where `muster init` puts a contributor's keystores unless told otherwise."""

ENGINES = ("transformers", "vllm")
"""What runs models: docs/engines.md."""
DTYPES = ("float32", "bfloat16")
"""Number formats that engines compute in."""

WORKER_VARIABLES, VALIDATOR_VARIABLES = "MUSTER_WORKER_", "MUSTER_VALIDATOR_"
JUROR_VARIABLES = "MUSTER_JUROR_"
"""What the environment variables of the processes' settings begin with."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def key_options(command: F) -> F:
    """Add --keystore and --password-file."""
    for option in (
        click.option("--password-file", type=FILE, help=PASSWORD_HELP),
        click.option("--keystore", type=FILE, required=True, help="Keystore of the signing key."),
    ):
        command = option(command)
    return command


def engine_options(command: F) -> F:
    """Add what an inference engine is made of."""
    for option in (
        click.option("--device", help="Where the model computes. [default: cpu]"),
        click.option(
            "--threads",
            type=click.IntRange(1, 256),
            help="CPU threads of the model. [default: 1]",
        ),
        click.option(
            "--dtype", type=click.Choice(DTYPES), help="Arithmetic of the model. [default: float32]"
        ),
    ):
        command = option(command)
    return command


def engine_choice(command: F) -> F:
    """Add --engine, and what an engine is made of."""
    command = engine_options(command)
    return click.option(
        "--engine", type=click.Choice(ENGINES), help="What runs the model. [default: transformers]"
    )(command)


def node_options(command: F) -> F:
    """Add what workers and validators share."""
    command = engine_choice(command)
    for option in (
        click.option(
            "--confirmations",
            metavar="N|safe|finalized",
            help=CONFIRMATIONS_HELP,
        ),
        click.option("--poll-s", type=float, help="Seconds between looks at the chain."),
        click.option("--keep-going", is_flag=True, default=None, help="Stay when the run is over."),
        click.option("--relay", multiple=True, metavar="URL", help=RELAY_HELP),
        click.option("--state-dir", type=FOLDER, help="Where the process keeps its state."),
        click.option("--orchestrator", metavar="URL", help=ORCHESTRATOR_HELP),
        click.option("--run", type=int, help="The run to take part in."),
        click.option("--config", type=FILE, help="TOML file with any of these settings."),
    ):
        command = option(command)
    return chain_options(key_options(command))


def open_keystore(keystore: Path, password_file: Path | None, what: str = "keystore") -> Wallet:
    """Return the account of a keystore; `what` it is is said when the password is asked for."""
    from muster.wallet import open_wallet

    return open_wallet(keystore, password_file, what=f"{what} {keystore}")
