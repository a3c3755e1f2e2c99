"""The load that one orchestrator process can serve, on SQLite and on PostgreSQL.

    make bench-orchestrator

 1. A process (`orchestrator_stage.py`) writes 1,000,000 submissions of 10,000 workers into both
    databases, and serves the whole application on one after the other. PostgreSQL is a real server
    that waits for its disk. Signatures, nonces, limits and files are all as in service.
 2. This process loads it over loopback with requests signed beforehand: heartbeats at rates that
    rise, leases, uploads of 100 kB, pages. A request's time counts from when it was due.
 3. Every answered request must be in the database afterwards, or the benchmark fails.
 4. 100,000 contract events are indexed as in `index.py`.

`heartbeats_per_s` is the highest rate at which the median of the rounds' 99th percentiles stays
below 100 ms; `heartbeat_p99_ms` is that median at 1,000 per second. Each rate is shown with the
server's CPU time, which depends less on other load, and with the CPU time lost to the machine's
host and disk. Writes results/orchestrator.json.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chain import index
from benchmarks.orchestrator.orchestrator_node import Stage
from benchmarks.orchestrator.orchestrator_phases import (
    Measured,
    Place,
    measure,
    measure_pages,
    staged,
)
from benchmarks.report import machine, print_table, write

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from postgres_server import PostgresServer

from muster.app.anvil import Anvil
from muster.chain import Chain
from muster.deploy import DeployParameters, deploy_contracts
from muster.protocol.messages import Ticket

LIMIT_MS = 100.0
MUST = {"heartbeats": 1000, "leases": 200, "uploads": 100}
FILE_BYTES = 100_000


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--submissions", type=int, default=1_000_000)
    parser.add_argument("--rates", type=int, nargs="+", default=[500, 1000, 1500, 2000])
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each phase lasts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-index", dest="index", action="store_false")
    parser.add_argument("--no-write", dest="write", action="store_false")
    return parser.parse_args(words)


async def main(options: argparse.Namespace) -> dict[str, float]:
    """Load both, print, write; return the metrics."""
    metrics: dict[str, float] = {}
    detail: dict[str, object] = {"workers": options.workers, "submissions": options.submissions}
    with (
        tempfile.TemporaryDirectory(prefix="bench") as folder,
        PostgresServer(is_durable=True) as server,
        staged(Path(folder), options, places(folder, server)) as stages,
    ):
        for kind, stage in stages:
            found, pages = await load(stage, options), await measure_pages(stage, options.rounds)
            tell(kind, found, pages)
            suffix = "" if kind == "SQLite" else "_postgres"
            metrics |= {name + suffix: value for name, value in summary(found, pages).items()}
            detail[kind] = {
                "phases": {name: [vars(one) for one in each] for name, each in found.items()},
                "pages_ms": pages,
                "memory_mb": stage.memory_mb(),
                "database_mb": stage.database_mb(),
                "load_average": os.getloadavg()[0],
            }
    if options.index:
        metrics["index_100k_s"] = await index_seconds()
    if options.write:
        write("orchestrator", metrics, detail, measured_on=machine())
    return metrics


def places(folder: str, server: PostgresServer) -> dict[str, Place]:
    """Return both kinds of databases."""
    return {
        "SQLite": (str(Path(folder) / "sqlite"), None),
        "PostgreSQL": (server.create(), server.pid),
    }


async def load(stage: Stage, options: argparse.Namespace) -> dict[str, list[Measured]]:
    """Load a stage with everything nodes ask."""
    before, seconds = stage.stored(), options.seconds
    # Everybody's first lease reads the history once, which a running process did long ago.
    await measure(stage, stage.leases(stage.keys()[:1]), None)
    found: dict[str, list[Measured]] = {"heartbeats": []}
    sent = 0
    for rate in [*options.rates * options.rounds, None]:
        requests = stage.heartbeats(int(seconds * (rate or max(options.rates))))
        measured, _ = await measure(stage, requests, rate)
        found["heartbeats"].append(measured)
        sent += len(requests)
    slots: list[tuple[bytes, Ticket]] = []
    found["leases"], found["uploads"] = [], []
    everybody = stage.keys()
    count = min(int(seconds * MUST["leases"]), len(everybody) // 2)
    for rate in (MUST["leases"], None):
        keys = everybody[len(slots) :][:count]
        measured, leased = await measure(stage, stage.leases(keys), rate)
        found["leases"].append(measured)
        slots += zip(keys, map(stage.ticket, leased.answers), strict=True)
    assert len({(t.worker, t.step, t.index) for _, t in slots}) == len(slots)
    uploaded, count = 0, min(int(seconds * MUST["uploads"]), len(slots) // 2)
    for rate in (MUST["uploads"], None):
        some = slots[uploaded:][:count]
        measured, _ = await measure(stage, stage.uploads(some, FILE_BYTES), rate)
        found["uploads"].append(measured)
        uploaded += len(some)
    stored = {name: number - before[name] for name, number in stage.stored().items()}
    wanted = {"heartbeats": sent, "leases": len(slots), "uploads": uploaded}
    if stored != wanted:
        raise SystemExit(f"error: {wanted} requests were answered, but the database holds {stored}")
    return found


async def index_seconds() -> float:
    """Return the CPU seconds to index 100,000 events, Anvil's included; see index.py."""
    async with Anvil(block_time_s=Anvil.STILL_S) as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, index.KEY, DeployParameters())
        async with await Chain.connect(anvil.rpc_url, deployment, key=index.KEY) as chain:
            await index.deposit_all(chain)
            readings = [await index.read_all(chain, anvil) for _ in range(index.ROUNDS)]
    return statistics.median(reading.total_cpu_s for reading in readings)


def summary(found: dict[str, list[Measured]], pages: dict[str, float]) -> dict[str, float]:
    """Return the metrics of one database."""
    beats: dict[float, list[Measured]] = {}
    for each in found["heartbeats"]:
        if each.rate is not None:
            beats.setdefault(each.rate, []).append(each)
    p99 = {
        rate: statistics.median(each.p99_ms for each in rounds) for rate, rounds in beats.items()
    }
    held = [
        rate
        for rate, rounds in beats.items()
        if p99[rate] < LIMIT_MS and statistics.median(r.per_s for r in rounds) > 0.97 * rate
    ]
    saturated = found["heartbeats"][-1]
    return {
        "heartbeats_per_s": max(held, default=0.0),
        "heartbeat_p99_ms": p99.get(MUST["heartbeats"], max(p99.values())),
        "heartbeats_saturated_per_s": saturated.per_s,
        "heartbeats_per_cpu_s": saturated.per_cpu_s,
        "leases_per_s": found["leases"][0].per_s,
        "leases_saturated_per_s": found["leases"][-1].per_s,
        "leases_per_cpu_s": found["leases"][-1].per_cpu_s,
        "lease_p99_ms": found["leases"][0].p99_ms,
        "uploads_per_s": found["uploads"][0].per_s,
        "uploads_saturated_per_s": found["uploads"][-1].per_s,
        "uploads_per_cpu_s": found["uploads"][-1].per_cpu_s,
        "upload_p99_ms": found["uploads"][0].p99_ms,
        "page_ms_max": max(pages.values(), default=0.0),
    }


def tell(kind: str, found: dict[str, list[Measured]], pages: dict[str, float]) -> None:
    """Print one database's tables."""
    times = ("p50_ms", "p99_ms", "cpu_ms", "database_cpu_ms", "load_cpu_ms")
    machine_times = ("stolen_percent", "disk_percent")
    header = ("", "offered/s", "answered/s", *times, *machine_times)
    rows = [
        (
            name,
            "all" if one.rate is None else f"{one.rate:.0f}",
            f"{one.per_s:.0f}",
            *(f"{getattr(one, each):.2f}" for each in times),
            *(f"{getattr(one, each):.0f}" for each in machine_times),
        )
        for name, phases in found.items()
        for one in phases
    ]
    print_table(f"{kind}: requests", header, rows)
    print_table(f"{kind}: pages", ("page", "ms"), [(p, f"{ms:.1f}") for p, ms in pages.items()])
    print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores", flush=True)


if __name__ == "__main__":
    asyncio.run(main(arguments()))
