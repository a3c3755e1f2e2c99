"""`muster audit watch`: one line per outcome, slash and claim, and per contradiction."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit.flags import PROOFS
from muster.client.options import chain_options, endpoint, json_option

if TYPE_CHECKING:
    from muster.client.audit.watching import Seen


@click.command("watch")
@click.option("--run", type=int, help="Show this run only; everything is checked.")
@click.option("--once", is_flag=True, help="Stop when all that is on chain was looked at.")
@click.option(
    "--poll-s",
    type=click.FloatRange(0.05, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option(
    "--finality",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Blocks that may be taken back.",
)
@click.option(
    "--prove",
    type=click.Choice(PROOFS[:2]),
    default="blocks",
    show_default=True,
    help="What the endpoint must prove by block hashes.",
)
@chain_options
@json_option
def watch(run: int | None, once: bool, poll_s: float, as_json: bool, **options: Any) -> None:
    """Follow the chain: what happens, and what contradicts, as it appears.

    With --once exits 1 when anything contradicts; else runs until it is stopped. JSON is one object
    per line.

    \b
    Examples:
      muster audit watch --run 1
      muster audit watch --once
    """
    import asyncio

    if asyncio.run(_watch(run, once, poll_s, as_json, options)):
        sys.exit(1)


async def _watch(
    run: int | None, once: bool, poll_s: float, as_json: bool, options: dict[str, Any]
) -> bool:
    """Return whether anything contradicts; comes back only with `once`."""
    import asyncio

    from muster.chain import Chain
    from muster.client.audit.sources import Proof
    from muster.client.audit.watching import Watch
    from muster.protocol.errors import ChainUnreachable
    from muster.protocol.ids import RunId

    async with await Chain.connect(*endpoint(options)) as chain:
        watched = Watch(
            chain,
            run_id=None if run is None else RunId(run),
            proof=Proof(options["prove"]),
            finality=options["finality"],
        )
        while True:
            try:
                seen = await watched.look()
            except ChainUnreachable as error:
                if once:
                    raise
                click.echo(f"waiting: {error}", err=True)
            else:
                print_seen(seen, as_json=as_json)
                if once:
                    return bool(seen.contradictions)
            await asyncio.sleep(poll_s)


def print_seen(seen: Seen, *, as_json: bool) -> None:
    """Print what one look brought."""
    for line in seen.lines:
        click.echo(json.dumps(asdict(line)) if as_json else str(line))
    for found in seen.contradictions:
        values = {"what": "contradiction", **found.to_json()}
        rule = f"the rule is that {found.kind.rule}"
        click.echo(
            json.dumps(values) if as_json else f"CONTRADICTION {found.kind}: {found}; {rule}"
        )
