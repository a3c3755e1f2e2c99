"""Time from `muster worker run` to the first accepted submission, and the cost of an idle worker.

    make bench-worker

A network like the demo's, with real processes. Validators are running and have judged before; then
new machines arrive one after the other, without a policy or imported modules. The first figure is
the time until the chain records a machine's first acceptance. When the run has made all its steps,
the last worker is idle: the second figure is its CPU time in half a minute, and that of a worker
with default settings.

Then a run with endless work and one validator: measured are the share of time in which the engine
neither generates nor checks, and the tickets per CPU second, for workers with one and with two
tickets at a time. The first tickets, which earn the second one, are not counted.

Last, the mean number of engine rows that hold a sample: with tickets one after the other, and with
two at a time, where one fills rows that the other frees. The decode loop is the engine's own, on
rows that compute nothing. Writes results/worker.json.
"""

import argparse
import asyncio
import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from benchmarks.report import machine, print_table, write

from muster.app.demo.keys import DemoWorker, Role, cast
from muster.app.demo.local_network import Network, NetworkOptions
from muster.app.demo.processes import DemoProcess
from muster.chain import ChainView, read_view
from muster.inference.decode_loop import Decode, Integers
from muster.inference.engine import Request
from muster.inference.forward import Predicted
from muster.protocol.ids import RunId
from muster.protocol.messages import Verdict
from muster.protocol.recipe import ProofRecipe

RECIPE = Path(__file__).parents[2] / "configs" / "demo.toml"
STEPS = 20
ARRIVALS = 3
"""Number of new machines, one after the other."""
IDLE_S = 30.0
"""How long an idle worker is watched."""
SETTLED_S = 5.0
"""Pause before that, until the work of the last step is done."""
TARGET_S, TARGET_SHARE = 20.0, 0.01
EARNING, WATCHED = 6, 24
"""Tickets before the measurement of an engine, and during it."""
TICKETS = (1, 2)
"""Tickets per engine."""
LOOK_S = 0.1
FILLING = 24
"""Tickets that rows are filled with."""
FILLED = ((64, 64), (64, 256), (128, 256), (256, 64), (256, 256))
"""Samples of a ticket, and rows of the engine."""


def accepted(view: ChainView, member: DemoWorker) -> int:
    """Return how many of a worker's submissions are recorded as accepted."""
    worker_id = view.workers[member.wallet.address].worker_id
    return sum(
        record.worker_id == worker_id and record.verdict is Verdict.ACCEPTED
        for batch in view.batches.values()
        for record in batch.records or ()
    )


async def until_accepted(network: Network, child: DemoProcess, member: DemoWorker) -> None:
    """Return once the chain records an acceptance of the worker's work."""
    async with asyncio.timeout(300), await network.connect() as chain:
        while not accepted(await read_view(chain, ChainView()), member):
            network.processes.require_running(child)
            await asyncio.sleep(LOOK_S)


def cpu_s(child: DemoProcess) -> float:
    """Return the CPU seconds that a process and its children have taken so far."""
    process = psutil.Process(child.pid)
    every = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in every)


def marks(child: DemoProcess, started: float) -> dict[str, float]:
    """Return the time of a worker's first log line of each kind, in seconds since its start."""
    found: dict[str, float] = {}
    for line in child.log.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["message"], entry["time"] - started)
    return found


async def arrive(
    network: Network, run_id: RunId, member: DemoWorker
) -> tuple[DemoProcess, dict[str, Any]]:
    """Start a worker on a fresh machine; return it and the time to its first acceptance."""
    began, started = time.monotonic(), time.time()
    child = await network.start_worker(run_id, member)
    await until_accepted(network, child, member)
    took = time.monotonic() - began
    said = marks(child, started)
    return child, {
        "accepted_s": took,
        "uploaded_s": said["submission uploaded"],
        "cpu_s": cpu_s(child),
    }


async def idle_share(child: DemoProcess) -> float:
    """Return the share of one core that an idle worker takes."""
    await asyncio.sleep(SETTLED_S)
    before, began = cpu_s(child), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (cpu_s(child) - before) / (time.monotonic() - began)


async def start_plain(network: Network, run_id: RunId, member: DemoWorker) -> DemoProcess:
    """Start a worker with only the required settings."""
    return await network.processes.start(
        f"{member.name}-plain",
        [
            *("muster.app", "worker", "run", "--run", str(run_id)),
            *("--worker", member.wallet.address, "--keystore", str(network.keystore(member.node))),
            *("--rpc", network.rpc, "--deployments", str(network.options.deployments)),
            *("--orchestrator", network.orchestrator_url),
            *("--state-dir", str(network.folder / "state" / member.name)),
        ],
    )


async def measure(folder: Path) -> dict[str, Any]:
    """Return the arrivals and the idle shares on one network."""
    people = cast(0, honest=ARRIVALS, cheats=())
    options = NetworkOptions(folder, folder / "deployments", people, RECIPE, STEPS, 0, rpc_port=0)
    # A worker leaves a run that is over, unless told to stay.
    environment = {"MUSTER_LOG_FORMAT": "json", "MUSTER_WORKER_KEEP_GOING": "true"}
    async with Network(options, environment=environment) as network:
        run_id = await network.begin()
        first = next(m for m in people.members if m.role is Role.RESTARTED)
        child, _ = await arrive(network, run_id, first)
        arrivals = []
        for member in [m for m in people.members if m.role is Role.HONEST]:
            await child.stop()
            child, arrival = await arrive(network, run_id, member)
            arrivals.append(arrival)
        async with asyncio.timeout(600):
            await network.processes.children["trainer"].wait()
        shares = {"as in the demo": await idle_share(child)}
        await child.stop()
        plain = await start_plain(network, run_id, member)
        await asyncio.sleep(2 * SETTLED_S)
        shares["as the command is"] = await idle_share(plain)
    return {"arrivals": arrivals, "idle_share": shares}


# Between tickets


def endless_recipe(folder: Path) -> Path:
    """Write the demo's recipe with steps so large that they never fill."""
    text = RECIPE.read_text()
    changed = re.sub(r"(?m)^submissions_per_step = .*$", "submissions_per_step = 1000", text)
    assert changed != text
    path = folder / "endless.toml"
    path.write_text(changed)
    return path


def between(ends: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return an engine's figures from the end of its first ticket to that of its last. `ends` has
    each ticket's end and the engine's seconds of work on it.
    """
    whole_s = ends[-1][0] - ends[0][0]
    gaps_s = [end - busy_s - before for (before, _), (end, busy_s) in itertools.pairwise(ends)]
    return {
        "idle_share": sum(gaps_s) / whole_s,
        "gap_s": statistics.median(gaps_s),
        "busy_s": statistics.median(busy_s for _, busy_s in ends[1:]),
    }


def generated(child: DemoProcess) -> list[tuple[float, float]]:
    """Return when each ticket of a worker was generated, and how long its engine took."""
    # The log appears with its first line, and its last line may be incomplete.
    whole = child.log.read_text().rpartition("\n")[0] if child.log.exists() else ""
    entries = [json.loads(line) for line in whole.splitlines()]
    return [(e["time"], e["busy_s"]) for e in entries if e["message"] == "ticket generated"]


async def measure_between(folder: Path, tickets: int) -> dict[str, float]:
    """Return the figures of an engine that works on `tickets` tickets at a time."""
    folder.mkdir()
    people = cast(0, honest=1, cheats=(), validators=1, jurors=0)
    options = NetworkOptions(
        folder, folder / "deployments", people, endless_recipe(folder), 1, 0, rpc_port=0
    )
    environment = {"MUSTER_LOG_FORMAT": "json", "MUSTER_WORKER_TICKETS_PER_ENGINE": str(tickets)}
    async with Network(options, environment=environment) as network:
        run_id = await network.begin()
        member = next(m for m in people.members if m.role is Role.HONEST)
        child = await network.start_worker(run_id, member)
        async with asyncio.timeout(600):
            begun = await until_generated(network, child, EARNING)
            began_cpu_s = cpu_s(child)
            ends = await until_generated(network, child, EARNING + WATCHED)
            took_cpu_s = cpu_s(child) - began_cpu_s
    return {
        **between(ends[EARNING - 1 :]),
        "tickets_per_cpu_s": (len(ends) - len(begun)) / took_cpu_s,
    }


async def until_generated(
    network: Network, child: DemoProcess, count: int
) -> list[tuple[float, float]]:
    """Wait for `count` tickets and return the result of `generated`."""
    while len(ends := generated(child)) < count:
        network.processes.require_running(child)
        await asyncio.sleep(LOOK_S)
    return ends


# Rows


class CountedRows:
    """Rows that compute nothing, and note how many there are at each step."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.live = 0
        self.steps: list[int] = []

    def room(self) -> int:
        """Return how many are free."""
        return self.places - self.live

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Take samples."""
        self.live += len(prompts)
        return _predicted(len(prompts))

    def step(self, tokens_R: Integers) -> Predicted:
        """Note a step."""
        self.steps.append(len(tokens_R))
        return _predicted(len(tokens_R))

    def keep(self, order: Integers) -> None:
        """Keep some."""
        self.live = len(order)


def _predicted(rows: int) -> Predicted:
    return torch.zeros(rows, 4), torch.zeros(rows, 2)


def filled(samples: int, rows: int, at_a_time: int) -> float:
    """Return the share of rows that hold a sample, for tickets of `samples` samples with lognormal
    lengths of sigma 0.5.
    """
    lengths = np.random.default_rng(0).lognormal(5, 0.5, (FILLING, samples)).astype(int) + 1
    counted, is_eos = CountedRows(rows), np.zeros(2, bool)
    proof, cpu = ProofRecipe(chunk_tokens=256, topk=1), torch.device("cpu")
    decode = Decode(counted, int(lengths.max()) + 1, is_eos, proof, cpu, is_wide=True)
    waiting = [[Request((0,), 0, 1.0, int(n)) for n in ticket] for ticket in lengths]
    with torch.inference_mode():
        while waiting:
            while waiting and len(decode.calls) < at_a_time:
                decode.begin(waiting.pop(0), due=-len(waiting))
            decode.step()
            for call in [each for each in decode.calls if each.is_over]:
                decode.leave(call)
    decode.close()
    return sum(counted.steps) / (rows * len(counted.steps))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry", action="store_true", help="Write nothing.")
    dry = parser.parse_args().dry
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
        gaps = {
            str(count): asyncio.run(measure_between(Path(folder) / str(count), count))
            for count in TICKETS
        }
    arrivals, shares = found["arrivals"], found["idle_share"]
    columns = ("uploaded_s", "accepted_s", "cpu_s")
    rows = [[f"{a[name]:.1f}" for name in columns] for a in arrivals]
    print_table(
        f"From `muster worker run` to work (at most {TARGET_S:g} s)",
        ["first upload, s", "first acceptance, s", "its CPU, s"],
        rows,
    )
    print_table(
        f"An idle worker (at most {TARGET_SHARE:.0%})",
        ["settings", "share of one core"],
        [[name, f"{share:.2%}"] for name, share in shares.items()],
    )
    print_table(
        "An engine between tickets",
        ["tickets at hand", "idle", "gap, s", "a ticket, s", "tickets a CPU second"],
        [
            [
                n,
                f"{each['idle_share']:.1%}",
                f"{each['gap_s']:.2f}",
                f"{each['busy_s']:.2f}",
                f"{each['tickets_per_cpu_s']:.1f}",
            ]
            for n, each in gaps.items()
        ],
    )
    fill = {
        f"{samples} in {rows}": {n: filled(samples, rows, n) for n in TICKETS}
        for samples, rows in FILLED
    }
    print_table(
        "Rows that hold a sample",
        ["samples of a ticket in rows", *(f"{n} ticket(s) at a time" for n in TICKETS)],
        [[name, *(f"{share:.0%}" for share in each.values())] for name, each in fill.items()],
    )
    metrics = {
        **{f"rows_filled_{n}": fill["64 in 64"][n] for n in TICKETS},
        **{f"tickets_per_cpu_s_{n}": each["tickets_per_cpu_s"] for n, each in gaps.items()},
        **{f"engine_idle_share_{n}": each["idle_share"] for n, each in gaps.items()},
        "first_accepted_s": statistics.median(a["accepted_s"] for a in arrivals),
        "start_cpu_s": statistics.median(a["cpu_s"] for a in arrivals),
        "idle_cpu_share": shares["as the command is"],
    }
    if not dry:
        write("worker", metrics, {**found, "between": gaps, "filled": fill}, measured_on=machine())


if __name__ == "__main__":
    main()
