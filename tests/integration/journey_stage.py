"""A contributor at the command line, on a real chain with the real contracts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chain_scenario
import click
from chain_scenario import (
    CHALLENGER,
    CHEATER,
    HONEST,
    JURORS,
    ORCHESTRATOR,
    OWNER,
    TRAINER,
    VALIDATORS,
    Person,
    Scenario,
    node_of,
)
from click.testing import CliRunner, Result

from muster.app.anvil import Anvil
from muster.app.cli import muster
from muster.chain import Chain, save_deployment
from muster.wallet import save_wallet

PASSWORD = "secret"
PEOPLE = (OWNER, ORCHESTRATOR, TRAINER, CHALLENGER, *VALIDATORS, HONEST, CHEATER, *JURORS)


@dataclass
class Stage:
    """A network and the keystores of its parties."""

    folder: Path
    scenario: Scenario

    def key(self, name: str) -> str:
        return str(self.folder / "keys" / f"{name}.json")

    async def run(self, *words: str, chain: bool = True, run_input: str | None = None) -> Result:
        """Run a command as a user does; `run_input` holds the answers to its questions."""
        flags = ["--rpc", self.scenario.anvil.rpc_url, "--deployments", str(self.folder)]
        return await asyncio.to_thread(
            CliRunner().invoke,
            muster,
            [*words, *(flags if chain else [])],
            env={"MUSTER_PASSWORD": PASSWORD},
            input=run_input,
        )

    async def json(self, *words: str) -> Any:
        """Return the JSON output of a command that must succeed."""
        result = await self.run(*words, "--json")
        if result.exception is not None:
            raise AssertionError(result.output) from result.exception
        return json.loads(result.stdout)

    async def error(self, *words: str) -> Any:
        """Return the error with which a command must fail."""
        result = await self.run(*words)
        assert result.exception is not None, result.output
        assert not isinstance(result.exception, SystemExit) or result.exit_code
        return result.exception

    def keep(self, name: str, person: Person) -> str:
        """Write somebody's keystore, and return its path."""
        save_wallet(Path(self.key(name)), person.key, PASSWORD, light=True)
        return self.key(name)


@asynccontextmanager
async def open_stage(folder: Path) -> AsyncIterator[Stage]:
    """Start a chain with a run, its three validators, two workers and jurors."""
    # A block that is mined during a revert can leave a chain that nobody can read.
    async with chain_scenario.network(block_time_s=Anvil.STILL_S) as scenario:
        save_deployment(folder, scenario.deployment)
        stage = Stage(folder, scenario)
        stage.keep("worker", HONEST)
        stage.keep("node", node_of(HONEST))
        stage.keep("cheater", CHEATER)
        stage.keep("validator", VALIDATORS[0])
        yield stage


@asynccontextmanager
async def undone(stage: Stage) -> AsyncIterator[Stage]:
    """Give one test the stage, and undo its changes on chain afterwards."""
    scenario = stage.scenario
    snapshot = await scenario.rpc.call("evm_snapshot")
    before = set(stage.folder.rglob("*"))
    async with contextlib.AsyncExitStack() as stack:
        # Fresh connections: a sender remembers nonces that a revert makes void.
        chains = {}
        for person in PEOPLE:
            chains[person.address] = await stack.enter_async_context(
                await Chain.connect(scenario.anvil.rpc_url, scenario.deployment, key=person.key)
            )
        yield Stage(stage.folder, replace(scenario, chains=chains))
    await scenario.rpc.call("evm_revert", snapshot)
    for path in set(stage.folder.rglob("*")) - before:
        path.unlink()


def hint(error: Any) -> str:
    """Return the hint of an error."""
    return getattr(error, "hint", "") or ""


def command_names(group: click.Group = muster, prefix: str = "") -> list[str]:
    """Return every command, without groups."""
    context, names = click.Context(group), []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            names += command_names(command, f"{prefix}{name} ")
        else:
            names.append(prefix + name)
    return names
