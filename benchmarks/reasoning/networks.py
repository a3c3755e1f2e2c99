"""The lesson's two networks: of the data run, and of the reinforcement.

Each is a chain, an orchestrator, three validators, a juror, a relay and four workers, of whom one
cheats; every process is real. Knows the networks' inputs and results, but no tables.
"""

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.app.demo.display import DemoDisplay
from muster.app.demo.keys import CHEATS, Cast, cast
from muster.app.demo.local_network import Network, NetworkOptions
from muster.app.demo.observations import observe
from muster.app.demo.processes import DemoProcess
from muster.app.demo.report import DemoObservations, run_checks, worker_reports
from muster.app.demo.story import settle, train
from muster.chain import ChainView, read_view
from muster.protocol.ids import RunId
from muster.protocol.messages import Reason, Verdict
from muster.trainer.config import load_recipe

LOOK_S = 2.0
SETTLE_S = 600.0
LEASE_S = 120
"""Seconds of a lease: a dozen processes share two cores."""
TIMEOUT_S = 1800.0
NOT_PROMISED = {"the policy learned"}
"""Checks of the demo that are skipped: the lesson itself measures what the model learned."""


@dataclass(frozen=True, slots=True)
class Given:
    """Inputs of a run."""

    folder: Path
    """Everything is written below it."""
    model: Path
    tasks: Path
    held_out: Path
    recipe: Path
    cheat: str
    """How the cheater cheats."""
    seed: int
    eval_every: int = 0
    """Steps between the trainer's evaluations; 0 for none."""


@dataclass(frozen=True, slots=True)
class Happened:
    """Results of a network, from its chain."""

    verdicts: dict[str, int]
    """Submissions by verdict."""
    reasons: dict[str, int]
    """Those that were not accepted, by reason."""
    workers: list[dict[str, Any]]
    """Each worker's part."""
    slashed_tokens: float
    """Stake that cheaters lost."""
    failed_checks: list[str]
    """Promises of `make demo` that did not hold: slashed without reason, trained twice, …"""


def people(seed: int, cheat: str = CHEATS[0]) -> Cast:
    """Return the cast of a network: two honest workers, one that is killed, a cheater."""
    return cast(seed, honest=2, cheats=(cheat,))


class LessonNetwork(Network):
    """A network with a given model and problems."""

    def __init__(self, given: Given) -> None:
        recipe = load_recipe(given.recipe)
        super().__init__(
            NetworkOptions(
                folder=given.folder,
                deployments=given.folder / "deployments",
                cast=people(given.seed, given.cheat),
                recipe=given.recipe,
                steps=recipe.training.steps,
                seed=given.seed,
                rpc_port=0,
                eval_every=given.eval_every,
                lease_s=LEASE_S,
            )
        )
        self._given = given

    async def prepare_model(self) -> None:
        """Take the model and the problems, and calibrate the validation limits."""
        given = self._given
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(given.model, self.folder / "model")
        shutil.copy(given.tasks, self.folder / "tasks.jsonl")
        shutil.copy(given.held_out, self.folder / "held-out.jsonl")
        await self.calibrate()

    async def start(self) -> RunId:
        """Start everything, workers included; returns the run's id."""
        run_id = await self.begin()
        for member in self.cast.members:
            await self.start_worker(run_id, member)
        return run_id

    async def command(self, name: str, *words: object) -> dict[str, Any]:
        """Run a command of `muster` that reads the chain, and return what it says."""
        text = [str(word) for word in words]
        printed = await self._run(name, [*text, "--json", *self._chain_flags()])
        said: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return said


class DataNetwork(LessonNetwork):
    """A network that makes data: where a trainer would be, a relay serves the base model."""

    async def start_trainer(self, run_id: RunId) -> DemoProcess:
        """Serve policy version 0, the only one."""
        return await self._start(
            "origin",
            ["relay", "run", "--run", str(run_id), "--store", str(self._store)],
            self._port_flags("origin"),
        )


# --------------------------------------------------------------------------------- the data run


async def make_data(
    given: Given, out: Path, least_reward: float, progress: DemoDisplay
) -> tuple[Happened, dict[str, Any]]:
    """Let a network sample the model, and write the right samples as a verified data set.

    Returns what happened, and the figures of the data set.
    """
    wanted = load_recipe(given.recipe).training.submissions_per_step
    async with DataNetwork(given) as network, asyncio.timeout(TIMEOUT_S):
        run_id = await network.start()
        progress.say(f"data run {run_id}: {wanted} submissions are wanted")
        await _accepted(network, run_id, wanted, progress)
        await settle(network, run_id, progress, timeout_s=SETTLE_S)
        made = await _export(network, run_id, given, out, least_reward)
        progress.say(f"data set of {made['rows']} rows, verified: {made['checks']}")
        async with await network.connect() as chain:
            view = await read_view(chain, ChainView())
        return _happened(view, run_id, [], []), made


async def _accepted(network: Network, run_id: RunId, wanted: int, progress: DemoDisplay) -> None:
    """Wait until the chain has recorded `wanted` accepted submissions."""
    seen = -1
    async with await network.connect() as chain:
        while seen < wanted:
            _require_services(network)
            view = await read_view(chain, ChainView())
            count = len(view.training_stream(run_id))
            if count * 4 // wanted > seen * 4 // wanted:
                progress.say(f"{count} of {wanted} accepted")
            seen = count
            await asyncio.sleep(LOOK_S)


def _require_services(network: Network) -> None:
    """Raise ConfigError when an orchestrator, relay or validator has ended."""
    children = network.processes.children
    names = [n for n in children if n.startswith(("orch", "relay", "origin", "validator"))]
    network.processes.require_running(*(children[name] for name in names))


async def _export(
    network: LessonNetwork, run_id: RunId, given: Given, out: Path, least_reward: float
) -> dict[str, Any]:
    model, folder = given.folder / "fetched", given.folder
    relays = ["--relay", network.relay_url, "--orchestrator", network.orchestrator_url]
    await network.command("fetch", "model", "fetch", "--run", run_id, "--out", model, *relays)
    evidence = ["--evidence", folder / "files", "--evidence", folder / "documents"]
    where = [*evidence, "--model", model, "--exclude", given.held_out]
    kept = ["--reward-at-least", least_reward, "--test-share", 0.05]
    export = ["data", "export", "--run", run_id, "--out", out, *kept, *where]
    made = await network.command("data-export", *export)
    verified = await network.command("data-verify", "data", "verify", out, *where)
    kept_rows = {name: made[name] for name in ("root", "rows", "submissions")}
    return {**kept_rows, "checks": {c["name"]: c["passed"] for c in verified["checks"]}}


# ---------------------------------------------------------------------------- the reinforcement


async def reinforce(given: Given, out: Path, progress: DemoDisplay) -> tuple[Happened, list[Any]]:
    """Train the model on a network, and fetch it from the relay.

    One worker is killed and comes back. Returns what happened, and the trainer's figures.
    """
    async with LessonNetwork(given) as network, asyncio.timeout(TIMEOUT_S):
        began = asyncio.get_running_loop().time()
        run_id = await network.start()
        progress.say(f"run {run_id}: {network.options.steps} steps; {network.orchestrator_url}")
        returned_at = await train(network, run_id, progress)
        await settle(network, run_id, progress, timeout_s=SETTLE_S)
        relays = ["--relay", network.relay_url, "--orchestrator", network.orchestrator_url]
        await network.command("fetch", "model", "fetch", "--run", run_id, "--out", out, *relays)
        steps = network.options.steps
        observed = await observe(network, run_id, steps, began, returned_at)
        checks = run_checks(observed, worker_reports(observed))
        failed = [c.name for c in checks if not c.passed and c.name not in NOT_PROMISED]
        figures = _read_lines(network.trainer_state / "metrics.jsonl")
        return _happened(observed.view, run_id, _workers(observed), failed), figures


def _workers(observed: DemoObservations) -> list[dict[str, Any]]:
    names = {member.wallet.address: member.name for member in observed.cast.members}
    return [{"name": names[w.address], **asdict(w)} for w in worker_reports(observed)]


def _happened(
    view: ChainView, run_id: RunId, workers: list[dict[str, Any]], failed: list[str]
) -> Happened:
    batches = [batch for batch in view.batches.values() if batch.run_id == run_id]
    records = [record for batch in batches for record in batch.records or ()]
    verdicts = Counter(Verdict(r.verdict).name.lower() for r in records)
    refused = [r for r in records if r.verdict != Verdict.ACCEPTED]
    reasons = Counter(Reason(r.reason).name.lower().replace("_", " ") for r in refused)
    slashed = sum(slash.amount_wei for slash in view.slashes) / 10**18
    return Happened(dict(verdicts), dict(reasons), workers, slashed, failed)


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
