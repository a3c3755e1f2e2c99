"""`muster init`, `muster wallet` and `muster node`: create and replace a contributor's keys.

`muster init` works in this order:

1. the words are shown once, or written to a file, and confirmed, before anything else is written
2. the node's key is random: `muster node rotate` replaces a lost one
3. the worker's keystore comes last, so that a folder with it is complete

For a rotation the new node signs its consent, and the worker sends it. Afterwards only earlier
signatures of the old key can still cost stake.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import click

from muster.chain import Chain, Receipt
from muster.client.cli.options import (
    FILE,
    FOLDER,
    HOME,
    PASSWORD_HELP,
    acting_options,
    agree,
    endpoint,
    json_option,
    key_options,
    open_keystore,
)
from muster.client.cli.printing import print_facts, print_json, print_result
from muster.client.preflight import require_gas, require_hot, require_worker
from muster.client.stake import CONSENT_S, consent_of
from muster.protocol.errors import WalletError
from muster.protocol.ids import Address
from muster.wallet import (
    Wallet,
    create_wallet,
    key_of_words,
    keystore_address,
    new_words,
    read_password,
    read_words,
    save_wallet,
    write_words,
)


@click.group()
def wallet() -> None:
    """Create and show encrypted keystores."""


@wallet.command("new")
@click.argument("file", type=FILE)
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option("--light", is_flag=True, help="Weak, fast encryption: for development chains only.")
@json_option
def wallet_new(file: Path, password_file: Path | None, light: bool, as_json: bool) -> None:
    """Create an account; FILE becomes its encrypted keystore. Prints the address.

    \b
    Example:
      muster wallet new validator.json
    """
    password = read_password(password_file, confirm=True, what="new keystore")
    created = create_wallet(file, password, light=light)
    _print_address(created.address, file, as_json)
    click.echo(f"The key is in {file}: back it up, nobody can restore it.", err=True)


@wallet.command("show")
@click.argument("file", type=FILE)
@json_option
def wallet_show(file: Path, as_json: bool) -> None:
    """Print the address of a keystore; needs no password.

    \b
    Example:
      muster wallet show ~/.muster/worker.json
    """
    _print_address(keystore_address(file), file, as_json)


def _print_address(address: str, file: Path, as_json: bool) -> None:
    print_result({"address": address, "keystore": str(file)}, as_json, address)


WORKER_FILE, NODE_FILE = "worker.json", "node.json"
"""File names of the keystores in their folder."""
CONFIRMED_WORDS = 3
"""Number of words that the user must type back."""
CONFIRMATIONS = 3
"""Number of tries to type them."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """A contributor's two accounts."""

    worker: Address
    """The cold key: holds the money and the stake."""
    node: Address
    """The hot key: signs submissions, holds nothing."""
    folder: Path
    """The folder of both keystores."""


def create_identity(
    folder: Path, words: str, passwords: tuple[str, str], *, light: bool = False
) -> Accounts:
    """Write both keystores and return their accounts; the passwords are the worker's, the node's.

    Raises WalletError when a keystore exists, or the words are no recovery words; then no new file
    is left.
    """
    require_free(folder)
    key = key_of_words(words)
    node = create_wallet(folder / NODE_FILE, passwords[1], light=light)
    try:
        worker = save_wallet(folder / WORKER_FILE, key, passwords[0], light=light)
    except BaseException:
        # A node's keystore without the worker's would block the next try.
        with contextlib.suppress(OSError):
            (folder / NODE_FILE).unlink()
        raise
    return Accounts(worker.address, node.address, folder)


def require_free(folder: Path) -> None:
    """Raise WalletError when the folder already holds a keystore."""
    for name in (WORKER_FILE, NODE_FILE):
        if (folder / name).exists():
            raise WalletError(
                f"{folder / name} exists already, and an account is never overwritten",
                hint="use it, or choose another folder with --dir; a lost node key is replaced by "
                "muster node rotate",
            )


def next_steps(identity: Accounts) -> str:
    """Return the next steps of a newcomer, as text."""
    worker, node = identity.folder / WORKER_FILE, identity.folder / NODE_FILE
    return (
        f"Next:\n"
        f"  muster run list                     which runs there are, what they pay\n"
        f"  muster doctor --run ID --orchestrator URL\n"
        f"                                       is this machine fit? Nothing is at stake\n"
        f"  muster doctor --run ID --no-proof --worker {identity.worker} \\\n"
        f"    --keystore {quote(str(node))} --orchestrator URL\n"
        f"                                       how many tokens and coins to send where:\n"
        f"  send the stake and gas money to {identity.worker},\n"
        f"  a bond and gas money to {identity.node}\n"
        f"  muster stake --keystore {quote(str(worker))} --node {quote(str(node))} --run ID\n"
        f"Keep {worker} off the machine that works: the node's keystore is enough there."
    )


# Words and people


def show_words(words: str, ask: Callable[[str], str]) -> None:
    """Show the words on the terminal once, and ask the user to type some of them back.

    Raises WalletError when the answers are wrong: nothing has been written then.
    """
    numbered = [f"{place:2}. {word:10}" for place, word in enumerate(words.split(), 1)]
    click.echo("Write these words down, on paper. They restore the worker's account: anybody who")
    click.echo("has them owns the account. They are shown now and never again.\n")
    for start in range(0, len(numbered), 4):
        click.echo("   " + "  ".join(numbered[start : start + 4]))
    click.echo("")
    ask("Press Enter when they are on paper")
    # The words must not stay on the screen, and must be typed back from paper.
    click.clear()
    _confirm(words.split(), ask)


def _confirm(words: list[str], ask: Callable[[str], str]) -> None:
    for _ in range(CONFIRMATIONS):
        places = sorted(secrets.SystemRandom().sample(range(len(words)), CONFIRMED_WORDS))
        if all(ask(f"Word {place + 1}").strip().lower() == words[place] for place in places):
            return
        click.echo("That is not what was shown.", err=True)
    raise WalletError(
        "the recovery words were not confirmed, and nothing was written",
        hint="run muster init again: it shows fresh words",
    )


def _ask(prompt: str) -> str:
    answer: str = click.prompt(prompt, default="", show_default=False)
    return answer


def _require_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise WalletError(
            "recovery words are shown on a terminal only, and there is none",
            hint="--words-file FILE writes them to a file; --recover-from FILE restores an account",
        )


def _words(words_file: Path | None, recover: bool, recover_from: Path | None) -> str:
    """Return the words of a new or restored account; new words are first saved by their owner."""
    if recover_from is not None:
        return read_words(recover_from)
    if recover:
        if not sys.stdin.isatty():
            raise WalletError(
                "there is no terminal to type words at",
                hint="write the words to a file and give it with --recover-from FILE",
            )
        typed: str = click.prompt("Recovery words", hide_input=True, err=True)
        key_of_words(typed)
        return typed
    words = new_words()
    if words_file is not None:
        write_words(words_file, words)
        click.echo(f"The recovery words are in {words_file}: move them off this machine.", err=True)
    else:
        show_words(words, _ask)
    return words


# Command


@click.command()
@click.option("--dir", "folder", type=FOLDER, help=f"Where the keystores go. [default: {HOME}]")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option("--node-password-file", type=FILE, help="Password of the node's keystore.")
@click.option("--words-file", type=FILE, help="Write the recovery words to this file instead.")
@click.option("--recover", is_flag=True, help="Restore the worker: asks for its words.")
@click.option("--recover-from", type=FILE, help="Restore the worker from words in a file.")
@click.option("--light", is_flag=True, help="Weak, fast encryption: for development chains only.")
@json_option
def init(
    folder: Path | None,
    password_file: Path | None,
    node_password_file: Path | None,
    **options: Any,
) -> None:
    """Create a contributor's keys: the worker's (cold) and the node's (hot).

    Twelve recovery words restore the worker in any wallet. They are shown once, before anything is
    written. Prints both addresses.

    \b
    Examples:
      muster init                              asks for a password, shows the words
      muster init --words-file words.txt       without a terminal: password in MUSTER_PASSWORD
      muster init --recover                    the same account on another machine
    """
    words_file, recover_from = options["words_file"], options["recover_from"]
    if sum(map(bool, (words_file, options["recover"], recover_from))) > 1:
        raise click.UsageError("--words-file, --recover and --recover-from exclude each other")
    folder = (folder or HOME).expanduser()
    require_free(folder)
    if not (words_file or options["recover"] or recover_from):
        _require_terminal()
    password = read_password(password_file, confirm=True, what="new keystores")
    node_password = read_password(node_password_file) if node_password_file else password
    words = _words(words_file, options["recover"], recover_from)
    identity = create_identity(folder, words, (password, node_password), light=options["light"])
    facts = {"worker": identity.worker, "node": identity.node, "folder": str(folder)}
    if options["as_json"]:
        print_json(facts)
    else:
        print_facts(facts)
        click.echo(next_steps(identity), err=True)


async def require_rotatable(chain: Chain, worker: Address) -> Address:
    """Return the worker's node; raises ConfigError when the worker may not replace it."""
    account = await require_worker(chain, worker)
    await require_gas(chain, worker, "rotate")
    return account.node


async def rotate_node(chain: Chain, worker: Address, node: Wallet) -> Receipt:
    """Replace the worker's node and return the receipt; raises ContractRevert for a used key."""
    deadline = await chain.now() + CONSENT_S
    return await chain.workers.rotate_node(await consent_of(chain, worker, node, deadline))


@click.group()
def node() -> None:
    """Replace a worker's hot key."""


@node.command("rotate")
@key_options
@click.option("--node", "file", type=FILE, required=True, help="Keystore; made when missing.")
@click.option("--node-password-file", type=FILE, help="Password of the node's keystore.")
@click.option("--light", is_flag=True, help="Weak, fast encryption: for development chains only.")
@acting_options
def rotate(
    keystore: Path,
    password_file: Path | None,
    file: Path,
    node_password_file: Path | None,
    light: bool,
    **options: Any,
) -> None:
    """Give a worker another node in all its runs; a keystore is created when it is missing.

    --keystore is the worker's. From then on nothing that the old node signs is work of its worker;
    for work committed before, it still answers. A key that was a node once cannot be one again.
    Prints the new node.

    \b
    Example:
      muster node rotate --keystore ~/.muster/worker.json --node ~/.muster/node-2.json
    """
    owner = open_keystore(keystore, password_file, "worker")
    fresh = _node_wallet(file, node_password_file or password_file, light)
    require_hot(fresh.address, owner.address)
    asyncio.run(_rotate(owner, fresh, options))


def _node_wallet(file: Path, password_file: Path | None, light: bool) -> Wallet:
    if file.exists():
        return open_keystore(file, password_file, "node")
    password = read_password(password_file, confirm=True, what=f"new keystore {file}")
    return create_wallet(file, password, light=light)


async def _rotate(owner: Wallet, fresh: Wallet, options: dict[str, Any]) -> None:
    async with await Chain.connect(*endpoint(options), key=owner.key) as chain:
        old = await require_rotatable(chain, owner.address)
        click.echo(
            f"worker {owner.address}: node {old} becomes {fresh.address}.\n"
            "Stop the worker's process first: submissions that the old node signed and that "
            "are not committed yet will be rejected.",
            err=True,
        )
        agree("Rotate?", options)
        receipt = await rotate_node(chain, owner.address, fresh)
    facts = {"node": fresh.address, "old_node": old, "transaction": receipt.tx_hash}
    print_result(facts, options["as_json"])
