"""One complete network on this machine: every process real, every process separate.

Owns the folder layout of a devnet and the order in which processes start. Does not know what a demo
shows or checks.

    <folder>/keys/        keystores           <folder>/logs/        one log per process
    <folder>/model/       base model          <folder>/documents/   recipe, calibration, task set
    <folder>/origin/      trainer's chunks    <folder>/relay/       the relay's
    <folder>/files/       submissions         <folder>/state/       one folder per process
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

from muster.app.anvil import Anvil
from muster.app.demo.keys import PASSWORD, Cast, DemoAccount, DemoWorker, Role
from muster.app.demo.processes import DemoProcess, Processes
from muster.chain import Chain, save_deployment
from muster.chain.structs import ZERO_ADDRESS
from muster.client.quantities import format_tokens
from muster.client.stake import (
    FAUCET_CHAIN_ID,
    join_bench,
    join_run,
    take_from_faucet,
    take_seat,
    terms_of_run,
)
from muster.deploy import DeployParameters, deploy_contracts
from muster.lifecycle import free_port
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, RunId
from muster.protocol.jury import BENCH
from muster.settings.profiles import Devnet, NetworkProfile, Served
from muster.wallet import Wallet, save_wallet

ETHER = 10**18
GAS_MONEY = 100 * ETHER
WORKER_STAKE = 1_000 * ETHER
VALIDATOR_STAKE = 5_000 * ETHER
JUROR_STAKE = 5_000 * ETHER
QUORUM = 2
"""Validators that must agree; fewer if the run has fewer."""
RUN_FUNDS = 100_000 * ETHER
PRICE_PER_UNIT = ETHER // 1_000
FRAUD_PPM = 500_000
"""Half the stake of a fraudulent worker is slashed."""
POLL_S = 0.2
"""Seconds between two polls of the chain or the orchestrator."""
LEASE_S = 15
"""Seconds after which a ticket is late, and a killed worker's slot is free again."""

MUSTER = "muster.app"
ADVERSARY = "muster.app.demo.adversary"

PARAMETERS = DeployParameters(
    required_worker_stake=WORKER_STAKE,
    required_validator_stake=VALIDATOR_STAKE,
    required_juror_stake=JUROR_STAKE,
    activation_delay_blocks=1,
    outcome_deadline_s=60,
    challenge_window_s=3,
    vote_commit_s=20,
    vote_reveal_s=10,
    slash_pause_s=20,
    unbonding_s=180,
    change_delay_s=180,
)
"""Contract parameters with windows of seconds, where a real network has days."""


class LocalChain(Protocol):
    """A development chain of this machine; an async context manager."""

    @property
    def rpc_url(self) -> str:
        """URL of its RPC endpoint."""

    async def set_balance(self, account: Address, wei: int) -> None:
        """Give an account the chain's coin, to pay for gas."""

    async def __aenter__(self) -> object:
        """Start it."""

    async def __aexit__(self, *_: object) -> None:
        """End it."""


def plain_anvil(port: int, log: Path) -> LocalChain:
    """Return an Anvil on this port."""
    return Anvil(port=port, log=log)


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Settings of a devnet."""

    folder: Path
    """Everything is written below it."""
    deployments: Path
    """Folder that receives `<chainId>.json`."""
    cast: Cast
    """Who takes part."""
    recipe: Path
    """The run's recipe, TOML."""
    steps: int
    """Training steps of the run."""
    seed: int
    """Seed of base model and task sets."""
    rpc_port: int = 8545
    """Anvil's port, 0 for any free one."""
    lesson: str = "sort"
    """Lesson of the base model's warm-up, see `muster.trainer.base_model`."""
    eval_every: int = 0
    """Evaluate every N steps, besides the first and the last; 0 for none."""
    problems: int = 2048
    """Training problems."""
    lease_s: int = LEASE_S
    """Seconds until a ticket is late."""
    make_chain: Callable[[int, Path], LocalChain] = plain_anvil
    """Makes the chain, given its port and the path of its log."""
    confirmations: int = 0
    """Blocks on top of an event before processes act on it."""
    database_url: str = ""
    """The orchestrator's PostgreSQL database; empty for a file of SQLite."""
    parameters: DeployParameters = PARAMETERS
    """Parameters of the contracts."""


class Network:
    """A running devnet; use as an async context manager. Leaving it ends every process."""

    def __init__(
        self, options: NetworkOptions, *, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.options = options
        self.folder = options.folder
        self.cast = options.cast
        self.processes = Processes(
            self.folder / "logs",
            {
                "MUSTER_PASSWORD": PASSWORD,
                # Many processes share few cores: each gets one thread, and idle threads must not
                # spin.
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "MKL_NUM_THREADS": "1",
                **environment,
            },
        )
        self._chain = options.make_chain(options.rpc_port, self.folder / "logs" / "anvil.log")
        self._ports: dict[str, int] = {}
        self._home = self.folder
        """Folder of the current run."""
        self._suffix = ""
        self.known: Devnet | None = None
        """Entry through which other commands on this machine find the network, if there is one."""
        self._served: dict[str, Served] = {}
        self.staked: dict[tuple[RunId, Address], int] = {}
        """What each account staked for each run; 0 is the jurors' bench."""

    async def __aenter__(self) -> Self:
        await self._chain.__aenter__()
        await self.processes.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.processes.__aexit__(kind, error, traceback)
        await self._chain.__aexit__(kind, error, traceback)

    @property
    def rpc(self) -> str:
        """The chain's endpoint."""
        return self._chain.rpc_url

    @property
    def orchestrator_url(self) -> str:
        """Where the orchestrator serves its API and the dashboard."""
        return self._url("orchestrator")

    @property
    def relay_url(self) -> str:
        """Where the relay serves policies."""
        return self._url("relay")

    @property
    def database(self) -> Path:
        """The orchestrator's database."""
        return self._home / "state" / "orchestrator.sqlite3"

    def _url(self, name: str) -> str:
        name += self._suffix
        if name not in self._ports:
            self._ports[name] = free_port()
        return f"http://127.0.0.1:{self._ports[name]}"

    # ------------------------------------------------------------------- chain

    async def start_chain(self) -> None:
        """Deploy the contracts, write keystores, hand out gas and tokens, seat the jurors."""
        for account in self.cast.accounts:
            await self._chain.set_balance(account.address, GAS_MONEY)
        deployment = await deploy_contracts(self.rpc, self.cast.owner.key, self.options.parameters)
        save_deployment(self.options.deployments, deployment)
        self._tell()
        self._write_keystores()
        async with asyncio.TaskGroup() as group:
            for juror in self.cast.jurors:
                group.create_task(self._sit(juror))
            group.create_task(self.fund_owner())

    def _write_keystores(self) -> None:
        nodes = [member.node for member in self.cast.members]
        for account in [*self.cast.accounts, *nodes]:
            save_wallet(self.keystore(account), account.key, PASSWORD, light=True)

    def keystore(self, account: DemoAccount) -> Path:
        """Return the keystore file of an account."""
        return self.folder / "keys" / f"{account.name.replace(' ', '-')}.json"

    async def connect(self, account: DemoAccount | None = None) -> Chain:
        """Return a chain client that sends as the account."""
        key = account.key if account else None
        return await Chain.connect(self.rpc, self.options.deployments, key=key)

    async def _sit(self, juror: DemoAccount) -> None:
        async with await self.connect(juror) as chain:
            await take_from_faucet(chain, juror.address, JUROR_STAKE)
            await join_bench(chain, JUROR_STAKE)
        self.staked[RunId(BENCH), juror.address] = JUROR_STAKE

    async def join(self, run_id: RunId, members: Sequence[DemoWorker] | None = None) -> None:
        """Let the run's validators take their seats and workers, by default all, join it."""
        async with asyncio.TaskGroup() as group:
            for validator in self.cast.validators:
                group.create_task(self._take_seat(run_id, validator))
            for member in self.cast.members if members is None else members:
                group.create_task(self._join(run_id, member))

    async def _take_seat(self, run_id: RunId, validator: DemoAccount) -> None:
        async with await self.connect(validator) as chain:
            await take_from_faucet(chain, validator.address, VALIDATOR_STAKE)
            _, terms = await terms_of_run(chain, run_id)
            await take_seat(chain, run_id, terms, VALIDATOR_STAKE)
        self.staked[run_id, validator.address] = VALIDATOR_STAKE

    async def _join(self, run_id: RunId, member: DemoWorker) -> None:
        async with await self.connect(member.wallet) as chain:
            await take_from_faucet(chain, member.wallet.address, WORKER_STAKE)
            # For bonds, in case nobody accepts or judges its work.
            await self._chain.set_balance(member.node.address, GAS_MONEY)
            await take_from_faucet(chain, member.node.address, self.options.parameters.bond)
            _, bound = await chain.workers.worker_of(member.wallet.address)
            node = _wallet(member.node) if bound == ZERO_ADDRESS else None
            await join_run(chain, _wallet(member.wallet), node, run_id, WORKER_STAKE)
        self.staked[run_id, member.wallet.address] = WORKER_STAKE

    async def fund_owner(self) -> None:
        """Give the owner the tokens for a run."""
        async with await self.connect(self.cast.owner) as chain:
            await take_from_faucet(chain, self.cast.owner.address, RUN_FUNDS)

    # ----------------------------------------------------------------- the run

    async def prepare_model(self) -> None:
        """Build the base model with its task sets, and calibrate its validation limits."""
        seed = str(self.options.seed)
        model, tasks = str(self.folder / "model"), str(self.folder / "tasks.jsonl")
        held_out = str(self.folder / "held-out.jsonl")
        await self._run(
            "base-model",
            ["run", "base-model", "--out", model, "--seed", seed],
            ["--task-set", tasks, "--eval-set", held_out, "--lesson", self.options.lesson],
            ["--problems", str(self.options.problems)],
        )
        await self.calibrate()

    async def calibrate(self) -> None:
        """Calibrate the validation limits for the model and the problems in the folder."""
        model, tasks = str(self.folder / "model"), str(self.folder / "tasks.jsonl")
        await self._run(
            "calibrate",
            ["calibrate", "--model", model, "--task-set", tasks],
            ["--recipe", str(self.options.recipe)],
            ["--out", str(self.folder / "calibration.json"), "--profile", "quick"],
        )

    def begin_another_run(self) -> None:
        """Let all later processes belong to another run, in `<folder>/open`."""
        self._home, self._suffix = self.folder / "open", "-open"

    async def create_run(self, *, steps: int | None = None) -> RunId:
        """Create and fund a run, with policy version 0 published; return its id."""
        people, steps = self.cast, self.options.steps if steps is None else steps
        validators = [f"--validator={account.address}" for account in people.validators]
        output = await self._run(
            "run-create",
            ["run", "create", "--json", "--yes", "--sample", "0", *self._chain_flags()],
            self._key_flags(people.owner),
            ["--trainer-keystore", str(self.keystore(people.trainer))],
            ["--orchestrator", people.orchestrator.address],
            [*validators, "--quorum", str(min(QUORUM, len(validators)))],
            ["--model", str(self.folder / "model"), "--recipe", str(self.options.recipe)],
            ["--task-set", str(self.folder / "tasks.jsonl"), "--steps", str(steps)],
            ["--calibration", str(self.folder / "calibration.json")],
            ["--documents", str(self._home / "documents"), "--store", str(self._store)],
            ["--price", format_tokens(PRICE_PER_UNIT, group=""), "--fraud-ppm", str(FRAUD_PPM)],
            ["--exact-fraud-ppm", str(FRAUD_PPM)],
            ["--fund", format_tokens(RUN_FUNDS, group="")],
        )
        return RunId(int(json.loads(output.splitlines()[-1])["run_id"]))

    async def audit(self, run_id: RunId) -> dict[str, Any]:
        """Return the result of `muster audit`, which reads only the chain."""
        command = ["audit", "--run", str(run_id), "--json", *self._chain_flags()]
        child = await self.processes.start("audit", [MUSTER, *command])
        await child.wait()
        try:
            found: dict[str, Any] = json.loads(child.log.read_text().splitlines()[-1])
        except (ValueError, IndexError) as error:
            raise ConfigError(f"muster audit failed:\n{child.log_tail()}") from error
        return found

    async def _run(self, name: str, *command: list[str]) -> str:
        """Run a command to its end and return what it printed to its log."""
        words = [word for part in command for word in part]
        child = await self.processes.start_warm(name + self._suffix, [MUSTER, *words])
        if await child.wait() != 0:
            self.processes.require_running(child)
        return child.log.read_text()

    async def begin(self) -> RunId:
        """Start everything except workers, beginning with the chain; returns the run's id."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.start_chain())
            group.create_task(self.prepare_model())
        run_id = await self.create_run()
        await self.join(run_id)
        await self.start_services(run_id)
        return run_id

    # ----------------------------------------------------------- its processes

    async def start_services(self, run_id: RunId) -> None:
        """Start trainer, relay, orchestrator, validators and jurors, in that order."""
        await self.start_trainer(run_id)
        await self._start(
            "relay",
            ["relay", "run", "--run", str(run_id), "--upstream", self._url("origin")],
            ["--store", str(self._home / "relay"), *self._port_flags("relay")],
        )
        await self.start_orchestrator(run_id)
        for validator in self.cast.validators:
            await self._start(
                validator.name,
                ["validator", "run", *self._node_flags(run_id, validator.name)],
                self._key_flags(validator),
                with_model=True,
            )

        for juror in self.cast.jurors:
            await self.start_juror(juror)

    async def start_juror(self, juror: DemoAccount) -> DemoProcess:
        """Start a juror of the network, once: it serves all runs."""
        if juror.name in self.processes.children:
            return self.processes.children[juror.name]
        state = self.folder / "state" / juror.name
        command = ["juror", "run", *self._chain_flags(), *self._key_flags(juror)]
        flags = ["--state-dir", str(state), *self._pace_flags()]
        return await self.processes.start_warm(juror.name, [MUSTER, *command, *flags])

    async def start_trainer(self, run_id: RunId) -> DemoProcess:
        """Start the trainer, which also is the origin."""
        return await self._start(
            "trainer",
            ["trainer", "run", "--run", str(run_id), "--orchestrator", self.orchestrator_url],
            ["--store", str(self._store), "--state-dir", str(self.trainer_state)],
            ["--eval-set", str(self.folder / "held-out.jsonl")],
            ["--eval-every", str(self.options.eval_every)],
            ["--documents", str(self._home / "documents"), *self._pace_flags()],
            [*self._port_flags("origin"), *self._key_flags(self.cast.trainer)],
            with_model=True,
        )

    async def start_orchestrator(self, run_id: RunId) -> DemoProcess:
        """Start the orchestrator; also after it was stopped or its database deleted."""
        self._served[str(run_id)] = Served(
            orchestrator=self.orchestrator_url, relays=(self.relay_url,)
        )
        self._tell()
        return await self._start(
            "orchestrator",
            ["orchestrator", "run", "--run", str(run_id), *self._port_flags("orchestrator")],
            ["--documents", str(self._home / "documents"), "--files", str(self._home / "files")],
            ["--database", self.options.database_url or str(self.database)],
            ["--origin", self._url("origin")],
            ["--relay", self._url("relay"), "--lease-s", str(self.options.lease_s)],
            ["--public-rpc", self.rpc],
            [*self._batch_flags(), *self._pace_flags()],
            self._key_flags(self.cast.orchestrator),
        )

    async def start_worker(self, run_id: RunId, member: DemoWorker) -> DemoProcess:
        """Start a worker; also after it was killed. A cheater runs the adversary of its kind."""
        flags = ["--worker", member.wallet.address, "--heartbeat-s", "2"]
        flags += [*self._node_flags(run_id, member.name), *self._key_flags(member.node)]
        if member.role is Role.CHEATER:
            assert member.cheat is not None
            flags += self._chain_flags()
            name = member.name + self._suffix
            return await self.processes.start_warm(name, [ADVERSARY, member.cheat, *flags])
        return await self._start(member.name, ["worker", "run", *flags], with_model=True)

    async def _start(self, name: str, *command: list[str], with_model: bool = False) -> DemoProcess:
        words = [word for part in command for word in part]
        start = self.processes.start_warm if with_model else self.processes.start
        return await start(name + self._suffix, [MUSTER, *words, *self._chain_flags()])

    def _tell(self) -> None:
        if self.known is not None:
            self.known.tell(
                NetworkProfile(
                    chain_id=FAUCET_CHAIN_ID,
                    rpc=(self.rpc,),
                    deployments=self.options.deployments.expanduser().absolute(),
                    runs=self._served,
                )
            )

    @property
    def trainer_state(self) -> Path:
        """Folder with the trainer's checkpoints and metrics."""
        return self._home / "state" / "trainer"

    @property
    def _store(self) -> Path:
        return self._home / "origin"

    def _chain_flags(self) -> list[str]:
        return ["--rpc", self.rpc, "--deployments", str(self.options.deployments)]

    def _key_flags(self, account: DemoAccount) -> list[str]:
        return ["--keystore", str(self.keystore(account))]

    def _port_flags(self, name: str) -> list[str]:
        return ["--port", self._url(name).rsplit(":", 1)[1]]

    def _node_flags(self, run_id: RunId, name: str) -> list[str]:
        state = self._home / "state" / name
        return [
            *("--run", str(run_id), "--orchestrator", self.orchestrator_url),
            *("--state-dir", str(state), *self._pace_flags()),
        ]

    def _batch_flags(self) -> list[str]:
        # A run without an end must not use all cores of the user's machine.
        commit_s, retry_s = ("2", "2") if self._suffix else ("0.3", "0.2")
        return ["--commit-interval-s", commit_s, "--retry-after-s", retry_s]

    def _pace_flags(self) -> list[str]:
        confirmations = self.options.confirmations
        awaited = ["--confirmations", str(confirmations)] if confirmations else []
        return ["--poll-s", str(POLL_S), *awaited]


def _wallet(account: DemoAccount) -> Wallet:
    return Wallet(account.address, account.key)
