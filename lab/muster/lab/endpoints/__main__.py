"""The demo through an endpoint with the faults of public ones.

    python -m muster.lab.endpoints --port 0 --out demo --deployments demo-deployments

Its chain is reorganised, so all processes wait for as many confirmations. Exits with 1 when a
promise is not kept.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self

import click

from muster.app.anvil import Anvil
from muster.app.demo.keys import CHEATS
from muster.app.demo.story import DemoOptions, run_demo
from muster.client.cli.printing import print_table
from muster.lab.endpoints.faults import PROFILES, Faults, PublicEndpoint, play
from muster.lab.endpoints.proxy import RpcProxy
from muster.protocol.ids import Address
from muster.settings.flags import RECIPE

SEED = 0


class PublicDevnet:
    """An Anvil behind such an endpoint, with rising fees and reorganisations."""

    def __init__(self, port: int, log: Path, faults: Faults = PROFILES["public"]) -> None:
        self._anvil = Anvil(block_time_s=Anvil.STILL_S, log=log)
        self._port, self._faults = port, faults
        self._endpoint = PublicEndpoint(faults, SEED)
        self._stack = AsyncExitStack()
        self.rpc_url = ""

    @property
    def played(self) -> Counter[str]:
        """Count of each fault so far."""
        return self._endpoint.played

    async def set_balance(self, account: Address, wei: int) -> None:
        """Give an account the chain's coin, to pay for gas."""
        await self._anvil.set_balance(account, wei)

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._anvil)
        proxy = RpcProxy(self._anvil.rpc_url, self._endpoint, port=self._port)
        await self._stack.enter_async_context(proxy)
        weather = asyncio.create_task(play(proxy, self._endpoint, self._faults))
        self._stack.push_async_callback(_end, weather)
        self.rpc_url = proxy.url
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@click.command()
@click.option("--port", default=8545, show_default=True, help="Port of the chain's RPC endpoint.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/endpoints"))
@click.option("--deployments", type=click.Path(path_type=Path), required=True)
@click.option("--recipe", type=RECIPE, default="demo", show_default=True, help="The run's recipe.")
def main(port: int, out: Path, deployments: Path, recipe: Path) -> None:
    """Play the demo, then print the count of each fault."""
    made: list[PublicDevnet] = []

    def make_chain(port: int, log: Path) -> PublicDevnet:
        made.append(PublicDevnet(port, log))
        return made[0]

    options = DemoOptions(
        folder=out,
        deployments=deployments,
        recipe=recipe,
        steps=0,
        seed=SEED,
        honest=2,
        cheats=CHEATS[:1],
        port=port,
        make_chain=make_chain,
        confirmations=PROFILES["public"].deepest,
    )
    report: dict[str, Any] = asyncio.run(run_demo(options))
    print_table(("what", "times"), [[what, str(n)] for what, n in made[0].played.most_common()])
    if not all(check["passed"] for check in report["checks"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
