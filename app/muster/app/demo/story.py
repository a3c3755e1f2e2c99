"""`muster demo`: the whole network on one machine, from deployment to the last payment.

The story, top to bottom: start a chain; build and calibrate a base model; create a run; start every
process; catch a cheater; kill a worker and restart it; pay the honest; audit; report.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from muster.app.demo.keys import CHEATS, PASSWORD
from muster.protocol.errors import ConfigError, StorageError, install_hint
from muster.settings import DEPLOYMENTS
from muster.settings.flags import FOLDER, RECIPE

if TYPE_CHECKING:
    from rich.console import Console

    from muster.app.demo.display import DemoDisplay
    from muster.app.demo.keys import DemoWorker
    from muster.app.demo.local_network import LocalChain, Network
    from muster.app.demo.processes import DemoProcess
    from muster.app.demo.report import DemoObservations
    from muster.chain import ChainView
    from muster.protocol.ids import RunId

logger = logging.getLogger(__name__)

STATUS_S = 0.5
"""Seconds between two polls of the orchestrator."""
ABSENT_S = 1.0
"""Seconds between killing the worker, after its first accepted submission, and restarting it."""
SETTLE_TIMEOUT_S = 60.0
"""Seconds after the last step within which all submissions must be judged, final and paid."""
RUN_TIMEOUT_S = 1800.0
"""Seconds after which a demo that has not finished its steps has failed."""
NEEDED = ("torch", "transformers", "fastapi", "sqlalchemy", "matplotlib")
"""Modules that its processes need from the extra `demo`."""
LOCK = ".demo"
"""File that marks a demo's folder and is locked while the demo runs."""
FREE_BYTES = 500 * 1024 * 1024
"""Free disk space that a demo needs."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the command line."""

    folder: Path
    """Output folder."""
    deployments: Path
    """Where `<chainId>.json` goes."""
    recipe: Path
    """The run's recipe."""
    steps: int
    """Training steps; 0 for the recipe's."""
    seed: int
    """Seed of accounts, base model and task sets."""
    honest: int
    """Honest workers beside the restarted one."""
    cheats: tuple[str, ...]
    """Kinds of cheaters."""
    port: int
    """Anvil's port, 0 for any free one."""
    keep: bool = False
    """Leave the network up at the end, until interrupted."""
    make_chain: Callable[[int, Path], LocalChain] | None = None
    """Makes the chain, see `NetworkOptions`; None for a plain Anvil."""
    confirmations: int = 0
    """Blocks on top of an event before processes act on it."""


@click.command()
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=0,
    show_default=False,
    help="Training steps. [default: the recipe's]",
)
@click.option("--seed", default=0, help="Seed of accounts, model and tasks.")
@click.option("--honest", type=click.IntRange(1, 16), default=2, help="Honest workers.")
@click.option(
    "--cheat",
    multiple=True,
    type=click.Choice(CHEATS),
    default=CHEATS[:1],
    help="Add a cheater of this kind; repeatable.",
)
@click.option("--keep", is_flag=True, help="Keep the network running until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--port", default=8545, help="Port of the chain's RPC endpoint.")
@click.option(
    "--recipe", type=RECIPE, default="demo", help="The run's recipe: TOML file or preset."
)
@click.option(
    "--out",
    "folder",
    type=FOLDER,
    default=Path("runs/demo"),
    help="Folder for all files of the demo.",
)
@click.option(
    "--deployments",
    type=FOLDER,
    default=DEPLOYMENTS,
    help="Folder to write the contracts' addresses to.",
)
def demo(cheat: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """See the whole network learn and catch a cheater, in two minutes.

    Starts a chain, the contracts, an orchestrator, three validators, a juror, a trainer, a relay,
    honest workers, one that is killed and comes back, and one that cheats. Writes report.json and
    reward.png. Exits with 1 if one of the report's checks fails.

    \b
    Example:
      muster demo --cheat forged-reward --seed 7 --keep
    """
    from muster.app.anvil import fetch_anvil

    for module in NEEDED:
        if find_spec(module) is None:
            raise ConfigError(
                f"{module} is not installed",
                hint=install_hint("demo"),
            )
    fetch_anvil(lambda text: click.echo(text, err=True))
    chosen = DemoOptions(cheats=cheat, **options)
    report = asyncio.run(_supervised(chosen, as_json))
    if not all(check["passed"] for check in report["checks"]):
        raise SystemExit(1)


async def _supervised(options: DemoOptions, as_json: bool) -> dict[str, Any]:
    """Run the demo so that SIGTERM and Ctrl-C end it, and every process with it."""
    import signal

    task = asyncio.ensure_future(run_demo(options, as_json=as_json))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise click.Abort from None


async def run_demo(options: DemoOptions, *, as_json: bool = False) -> dict[str, Any]:
    """Play the whole story and return the report, which is also written to `report.json`."""
    from rich.console import Console

    from muster.app.demo.display import DemoDisplay, show_report
    from muster.app.demo.keys import cast
    from muster.app.demo.local_network import Network, NetworkOptions, plain_anvil
    from muster.app.demo.observations import observe
    from muster.settings.profiles import announced
    from muster.trainer.config import load_recipe

    began = time.monotonic()
    people = cast(options.seed, honest=options.honest, cheats=options.cheats)
    steps = options.steps or load_recipe(options.recipe).training.steps
    if not steps:
        raise ConfigError(f"{options.recipe} has no training.steps", hint="give --steps N")
    network_options = NetworkOptions(
        folder=options.folder,
        deployments=options.deployments,
        cast=people,
        recipe=options.recipe,
        steps=steps,
        seed=options.seed,
        rpc_port=options.port,
        make_chain=options.make_chain or plain_anvil,
        confirmations=options.confirmations,
    )
    names = {member.wallet.address: member.name for member in people.members}
    console = Console(stderr=as_json)
    async with AsyncExitStack() as stack:
        stack.enter_context(prepare_folder(options.folder))
        network = await stack.enter_async_context(Network(network_options))
        network.known = stack.enter_context(announced())
        with DemoDisplay(console, names) as progress:
            run_id = await start(network, progress)
            returned_at = await train(network, run_id, progress)
            await settle(network, run_id, progress)
            await take_model(network, run_id, progress)
            observed = await observe(network, run_id, steps, began, returned_at)
        report = write_report(options.folder, observed)
        show_report(console, options.folder, observed, report)
        if as_json:
            click.echo(json.dumps(report))
        if options.keep:
            await keep_open(network, console)
    return report


# ---------------------------------------------------------------------- start


def prepare_folder(folder: Path) -> IO[bytes]:
    """Empty the folder of the last demo, and return a lock on it to hold while this one runs.

    Raises ConfigError when the folder holds something else or a running demo, and StorageError
    when the disk is nearly full.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / LOCK).exists():
        raise ConfigError(
            f"{folder} is not empty and not a demo's folder",
            hint="choose another folder with --out; no file was changed",
        )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES:
        raise StorageError(
            f"only {free >> 20} MiB are free at {folder}, a demo needs {FREE_BYTES >> 20}",
            hint="free some space, or choose another disk with --out",
        )
    lock = _lock(folder)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink()
    return lock


def _lock(folder: Path) -> IO[bytes]:
    import fcntl

    lock = (folder / LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            f"a demo is running in {folder}",
            hint="end it with Ctrl-C, or choose another folder with --out and another --port",
        ) from error
    return lock


async def start(network: Network, progress: DemoDisplay) -> RunId:
    """Start everything and return the run's id."""
    progress.say("starting a chain; training a base model and measuring the noise of honest work")
    async with asyncio.TaskGroup() as group:
        group.create_task(_start_chain(network, progress))
        group.create_task(network.prepare_model())
    progress.say("the base model is trained and calibrated")
    run_id = await network.create_run()
    progress.say(f"run {run_id} created and funded; policy 0 published")
    await network.join(run_id)
    await network.start_services(run_id)
    for member in network.cast.members:
        await network.start_worker(run_id, member)
    progress.say(f"status page {network.orchestrator_url}")
    return run_id


async def _start_chain(network: Network, progress: DemoDisplay) -> None:
    from muster.chain.abi import CONTRACTS

    await network.start_chain()
    progress.say(f"chain {network.rpc} with {len(CONTRACTS)} contracts")


# ---------------------------------------------------------------------- train


async def train(network: Network, run_id: RunId, progress: DemoDisplay) -> int | None:
    """Watch until the trainer has made its steps; kill one worker on the way and bring it back.

    Returns the block in which it came back, None if the steps were over before.
    """
    trainer = network.processes.children["trainer"]
    victim = next(m for m in network.cast.members if m.role == "restarted")
    async with asyncio.timeout(RUN_TIMEOUT_S):
        killed: asyncio.Task[int] | None = None
        while trainer.exit_code is None:
            _require_alive(network)
            status = await _status(network)
            if status:
                progress.show(status)
                if killed is None and _has_worked(status, victim):
                    killed = asyncio.create_task(
                        _kill_and_return(network, run_id, victim, progress)
                    )
            await asyncio.sleep(STATUS_S)
        returned_at = await killed if killed else None
    if trainer.exit_code != 0:
        network.processes.require_running(trainer)
    return returned_at


async def _kill_and_return(
    network: Network, run_id: RunId, victim: DemoWorker, progress: DemoDisplay
) -> int:
    child = network.processes.children[victim.name]
    child.kill()
    await child.wait()
    progress.say(f"{victim.name} was killed (SIGKILL)")
    await asyncio.sleep(ABSENT_S)
    await network.start_worker(run_id, victim)
    progress.say(f"{victim.name} is back")
    async with await network.connect() as chain:
        return await chain.block_number()


def _has_worked(status: dict[str, Any], member: DemoWorker) -> bool:
    rows = [row for row in status["workers"] if row["worker"] == member.wallet.address]
    return any(row["accepted"] > 0 for row in rows)


def _require_alive(network: Network) -> None:
    """Raise when a process died that nobody killed; banned workers stop by themselves, and all
    workers and validators once the run is over.
    """
    members = {member.name for member in network.cast.members if member.role != "honest"}
    free = {"trainer", "base-model", "calibrate", "run-create"} | members
    children = network.processes.children
    try:
        network.processes.require_running(
            *(child for name, child in children.items() if name not in free and child.exit_code)
        )
    except ConfigError as error:
        raise ConfigError(f"{error}{_frauds(children)}", hint=error.hint) from error


def _frauds(children: Mapping[str, DemoProcess]) -> str:
    """Return what the validators found last: why an honest worker may have had to stop."""
    validators = [child for name, child in children.items() if name.startswith("validator")]
    logs = [child.log.read_text(errors="replace").splitlines() for child in validators]
    lines = [[line for line in log if "verdict=FRAUD" in line][-3:] for log in logs]
    return "".join(f"\n{line}" for found in lines for line in found)


async def _status(network: Network) -> dict[str, Any] | None:
    """Return the orchestrator's status, None while it is not up."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
            answer = await http.get(f"{network.orchestrator_url}/v1/status")
            return answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


# ----------------------------------------------------------------------- keep


async def keep_open(network: Network, console: Console) -> None:
    """Start a run without an end, print how to join it, and keep the network up."""
    finished = network.orchestrator_url
    await network.fund_owner()
    network.begin_another_run()
    run_id = await network.create_run(steps=0)
    first, *_ = network.cast.members
    await network.join(run_id, [first])
    await network.start_services(run_id)
    await network.start_worker(run_id, first)
    command = shlex.join(
        [
            *(str(Path(sys.argv[0]).resolve()), "devnet", "join", "--run", str(run_id)),
            *("--orchestrator", network.orchestrator_url),
            *("--rpc", network.rpc, "--deployments", str(network.options.deployments.resolve())),
        ]
    )
    say = partial(console.print, soft_wrap=True, markup=False, highlight=False)
    say(f"\nThe network stays up until Ctrl-C. The finished run: {finished}")
    say(f"Run {run_id} goes on without a last step: {network.orchestrator_url}")
    say("Join it as a worker: this command, in another terminal, makes keys, tokens and a stake:\n")
    say(f"  {command}\n")
    say(f"All keystores here have the password {PASSWORD!r}.")
    children = network.processes.children
    while True:
        network.processes.require_running(
            *(c for n, c in children.items() if n.endswith("-open") and n != "run-create-open")
        )
        await asyncio.sleep(STATUS_S)


# --------------------------------------------------------------------- settle


async def settle(
    network: Network, run_id: RunId, progress: DemoDisplay, *, timeout_s: float = SETTLE_TIMEOUT_S
) -> None:
    """Wait until all submissions are judged and final, then claim every honest reward."""
    from muster.chain import ChainView, read_view
    from muster.client.rewards import claim, find_earnings

    async with (
        asyncio.timeout(timeout_s),
        await network.connect(network.cast.owner) as chain,
    ):
        while not await _is_settled(network, await read_view(chain, ChainView())):
            await asyncio.sleep(STATUS_S)
        for member in network.cast.members:
            await network.processes.children[member.name].stop()
        while True:
            view = await read_view(chain, ChainView())
            earnings = [
                await find_earnings(chain, view, run_id, member.wallet.address)
                for member in network.cast.members
            ]
            released = all(slash.state.lower() == "released" for slash in view.slashes)
            if released and not any(e.pending for e in earnings):
                break
            await asyncio.sleep(STATUS_S)
        for member, earned in zip(network.cast.members, earnings, strict=True):
            for receipt in await claim(chain, earned):
                amount = earned.amount_wei(earned.claimable) / 10**18
                progress.say(f"{member.name} was paid {amount:g} tokens  {receipt.tx_hash}")


async def _is_settled(network: Network, view: ChainView) -> bool:
    """Return whether every stored submission has an outcome and every fraud was executed."""
    from muster.app.demo.observations import read_database
    from muster.protocol.messages import Verdict

    records = [record for batch in view.batches.values() for record in batch.records or []]
    judged = {record.file_hash for record in records}
    cheaters = {record.worker_id for record in records if record.verdict is Verdict.FRAUD}
    stored = read_database(network.database)
    slashed = {view.workers[slash.owner].worker_id for slash in view.slashes}
    return all(row.file_hash in judged for row in stored) and cheaters == slashed


async def take_model(network: Network, run_id: RunId, progress: DemoDisplay) -> None:
    """Fetch the trained model from the relay, as anybody may, and ask it something."""
    from muster.client.audit.history import HistorySource, read
    from muster.client.chat import AnswerSettings, Speaker
    from muster.client.model import WantedVersion, fetch_model
    from muster.tasks import TaskSet

    out = network.folder / "trained-model"
    history = await read(HistorySource((network.rpc,), network.options.deployments))
    await fetch_model(WantedVersion(run_id, None, (network.relay_url,), None, out), history)
    asked = TaskSet.open(network.folder / "held-out.jsonl")[0].prompt
    speaker = Speaker(out, AnswerSettings(64, 0.0, "cpu", "float32"))
    answer = await asyncio.to_thread(lambda: "".join(speaker.answer(asked)))
    progress.say(f"the trained model is in {out}: {asked} {answer}")


# --------------------------------------------------------------------- report


def write_report(folder: Path, observed: DemoObservations) -> dict[str, Any]:
    """Write `report.json` and `reward.png`, and return the report."""
    from muster.app.demo.display import save_reward_curve
    from muster.app.demo.report import build_report

    report = build_report(observed)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    save_reward_curve(folder / "reward.png", report["reward"]["curve"], observed.evaluations)
    return report
