"""`muster node rotate`: another hot key for a worker, made when there is none.

The new node signs its consent, the worker sends it. Whoever loses a node's key rotates it: nothing
is at stake but what was signed with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from muster.protocol.ids import Address

if TYPE_CHECKING:
    from muster.chain import Chain, Receipt
    from muster.wallet import Wallet


async def require_rotatable(chain: Chain, worker: Address) -> Address:
    """Return the worker's node; raises ConfigError when it may not have another."""
    from muster.client.preflight import require_gas, require_worker

    account = await require_worker(chain, worker)
    await require_gas(chain, worker, "rotate")
    return account.node


async def rotate_node(chain: Chain, worker: Address, node: Wallet) -> Receipt:
    """Replace the worker's node and return the receipt; raises ConfigError for a used key."""
    from muster.client.stake import CONSENT_S, consent_of

    if node.address == worker:
        raise ConfigError(
            "the new node is the worker's own key, which belongs on no working machine",
            hint="name a file that does not exist: it becomes a fresh node's keystore",
        )
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
@yes_option
@json_option
@chain_options
def rotate(
    keystore: Path,
    password_file: Path | None,
    file: Path,
    node_password_file: Path | None,
    light: bool,
    **options: Any,
) -> None:
    """Give a worker another node in all its runs; a keystore is created when it is missing.

    --keystore is the worker's. The old node may sign no more from then on; a key that ever was a
    node is never one again. Prints the new node.

    \b
    Example:
      muster node rotate --keystore ~/.muster/worker.json --node ~/.muster/node-2.json
    """
    import asyncio

    owner = open_keystore(keystore, password_file, "worker")
    fresh = _node_wallet(file, node_password_file or password_file, light)
    asyncio.run(_rotate(owner, fresh, options))


def _node_wallet(file: Path, password_file: Path | None, light: bool) -> Wallet:
    from muster.wallet import create_wallet, read_password

    if file.exists():
        return open_keystore(file, password_file, "node")
    password = read_password(password_file, confirm=True, what=f"new keystore {file}")
    return create_wallet(file, password, light=light)


async def _rotate(owner: Wallet, fresh: Wallet, options: dict[str, Any]) -> None:
    from muster.chain import Chain

    async with await Chain.connect(*endpoint(options), key=owner.key) as chain:
        old = await require_rotatable(chain, owner.address)
        click.echo(
            f"worker {owner.address}: node {old} becomes {fresh.address}.\n"
            "Stop the worker's process first: what the old node signed and is not yet committed "
            "will be rejected.",
            err=True,
        )
        if not options["yes"]:
            click.confirm("Rotate?", abort=True, err=True)
        receipt = await rotate_node(chain, owner.address, fresh)
    facts = {"node": fresh.address, "old_node": old, "transaction": receipt.tx_hash}
    if options["as_json"]:
        print_json(facts)
    else:
        print_facts(facts)
