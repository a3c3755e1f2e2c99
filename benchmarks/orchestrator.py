"""What one orchestrator process holds, on SQLite and on PostgreSQL.

    make bench-orchestrator

 1. A process (`orchestrator_stage.py`) writes 1,000,000 submissions of 10,000 workers into both
    databases, and serves the whole application on one after the other. PostgreSQL is a real server
    that waits for its disk. Signatures, nonces, limits and files are all as in service.
 2. This process loads it over loopback with requests signed beforehand: heartbeats at rates that
    rise, leases, uploads of 100 kB, pages. A request's time counts from when it was due.
 3. What was answered must be in the database afterwards, or the bench stops.
 4. 100,000 contract events are indexed as in `index.py`.

`heartbeats_per_s` is the highest rate at which the median of the rounds' 99th percentiles stays
below 100 ms; `heartbeat_p99_ms` is that median at 1,000 per second. Each rate stands beside the
server's CPU time, which moves less when the machine does other things too.
Writes results/orchestrator.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import index
from orchestrator_load import Outcome, drive
from orchestrator_node import Stage
from report import machine, print_table, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from postgres_server import PostgresServer

from muster.chain import Anvil, Chain, DeployParameters, deploy_contracts

STAGE = Path(__file__).with_name("orchestrator_stage.py")
LIMIT_MS = 100.0
MUST = {"heartbeats": 1000, "leases": 200, "uploads": 100}
FILE_BYTES = 100_000
PAGE_ROUNDS = 5
START_S = 3600


@dataclass
class Measured:
    """One phase of load."""

    rate: float | None
    """Requests offered per second; None for as many as are answered."""
    per_s: float
    """Requests answered per second."""
    p50_ms: float
    """Median time of an answer since its request was due."""
    p99_ms: float
    """99th percentile of it."""
    cpu_ms: float
    """The process's CPU time per request."""
    database_cpu_ms: float
    """The database server's CPU time per request."""
    load_cpu_ms: float
    """CPU time of the load itself per request."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what was asked for."""
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
    with staged(options) as stages:
        for kind, stage in stages:
            found, pages = await load(stage, options), await measure_pages(stage)
            tell(kind, found, pages)
            suffix = "" if kind == "SQLite" else "_postgres"
            metrics |= {name + suffix: value for name, value in summary(found, pages).items()}
            detail[kind] = {
                "phases": {name: [vars(one) for one in each] for name, each in found.items()},
                "pages_ms": pages,
                "memory_mb": stage.memory_mb(),
            }
    if options.index:
        metrics["index_100k_s"] = await index_seconds()
    if options.write:
        write("orchestrator", metrics, detail, measured_on=machine())
    return metrics


@contextlib.contextmanager
def staged(options: argparse.Namespace) -> Iterator[Iterator[tuple[str, Stage]]]:
    """Yield the stages, one after the other, each until the next is asked for."""
    with (
        tempfile.TemporaryDirectory(prefix="bench") as name,
        PostgresServer(is_durable=True) as server,
    ):
        folder, url = Path(name), server.create()
        command = [sys.executable, str(STAGE), name, "sqlite", url]
        command += ["--workers", str(options.workers), "--submissions", str(options.submissions)]
        process = subprocess.Popen(command)
        places = {"SQLite": (str(folder / "sqlite"), None), "PostgreSQL": (url, server.pid)}
        try:
            yield _each(folder, process, options.workers, places)
        finally:
            process.terminate()
            process.wait(60)


def _each(
    folder: Path,
    process: subprocess.Popen[bytes],
    workers: int,
    places: dict[str, tuple[str, int | None]],
) -> Iterator[tuple[str, Stage]]:
    for number, (kind, (database, server_pid)) in enumerate(places.items()):
        deadline = time.monotonic() + START_S
        while not (folder / f"{number}.ready").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("error: the orchestrator did not start")
            time.sleep(0.1)
        known = {"database": database, "pid": process.pid, "server_pid": server_pid}
        yield kind, Stage.read(folder, number, workers=workers, **known)
        process.send_signal(signal.SIGTERM)


async def load(stage: Stage, options: argparse.Namespace) -> dict[str, list[Measured]]:
    """Load a stage with everything nodes ask."""
    before, seconds = stage.stored(), options.seconds
    # Everybody's first lease walks the history once; a process in service has done that long ago.
    await measure(stage, stage.leases(stage.keys()[:1]), None)
    found: dict[str, list[Measured]] = {"heartbeats": []}
    sent = 0
    for rate in [*options.rates * options.rounds, None]:
        requests = stage.heartbeats(int(seconds * (rate or max(options.rates))))
        measured, _ = await measure(stage, requests, rate)
        found["heartbeats"].append(measured)
        sent += len(requests)
    count = int(seconds * MUST["leases"])
    keys = stage.keys()[:count]
    measured, leased = await measure(stage, stage.leases(keys), MUST["leases"])
    found["leases"] = [measured]
    tickets = [stage.ticket(answer) for answer in leased.answers]
    assert len({(t.worker, t.step, t.index) for t in tickets}) == len(keys)
    slots = list(zip(keys, tickets, strict=True))[: int(seconds * MUST["uploads"])]
    uploads = stage.uploads(slots, FILE_BYTES)
    found["uploads"] = [(await measure(stage, uploads, MUST["uploads"]))[0]]
    stored = {name: number - before[name] for name, number in stage.stored().items()}
    wanted = {"heartbeats": sent, "leases": len(keys), "uploads": len(uploads)}
    if stored != wanted:
        raise SystemExit(f"error: {wanted} were answered, the database holds {stored}")
    return found


async def measure(
    stage: Stage, requests: Sequence[bytes], rate: float | None
) -> tuple[Measured, Outcome]:
    """Send requests; all of them must be taken."""
    before, own = stage.cpu_s(), time.process_time()
    outcome = await drive(stage.url, requests, rate=rate)
    spent = [now - then for now, then in zip(stage.cpu_s(), before, strict=True)]
    own, count = time.process_time() - own, len(requests)
    if set(outcome.statuses) - {200, 202}:
        raise SystemExit(f"error: not every request was taken: {dict(outcome.statuses)}")
    measured = Measured(
        rate=rate,
        per_s=outcome.per_s,
        p50_ms=outcome.percentile_ms(0.5),
        p99_ms=outcome.percentile_ms(0.99),
        cpu_ms=1000 * spent[0] / count,
        database_cpu_ms=1000 * spent[1] / count,
        load_cpu_ms=1000 * own / count,
    )
    return measured, outcome


async def measure_pages(stage: Stage) -> dict[str, float]:
    """Return the median milliseconds of each page."""
    found: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=stage.url, timeout=60, trust_env=False) as http:
        for name, path in stage.pages.items():
            times = []
            for _ in range(PAGE_ROUNDS):
                # Caches of a fraction of a second must not hide what a page costs.
                await asyncio.sleep(0.25)
                started = time.perf_counter()
                (await http.get(path)).raise_for_status()
                times.append(1000 * (time.perf_counter() - started))
            found[name] = statistics.median(times)
    return found


async def index_seconds() -> float:
    """Return the CPU seconds to index 100,000 events, Anvil's included; see index.py."""
    async with Anvil(block_time_s=1000) as anvil:
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
        "heartbeats_per_cpu_s": 1000 / saturated.cpu_ms,
        "leases_per_s": found["leases"][0].per_s,
        "leases_per_cpu_s": 1000 / found["leases"][0].cpu_ms,
        "lease_p99_ms": found["leases"][0].p99_ms,
        "uploads_per_s": found["uploads"][0].per_s,
        "uploads_per_cpu_s": 1000 / found["uploads"][0].cpu_ms,
        "upload_p99_ms": found["uploads"][0].p99_ms,
        "page_ms_max": max(pages.values(), default=0.0),
    }


def tell(kind: str, found: dict[str, list[Measured]], pages: dict[str, float]) -> None:
    """Print one database's tables."""
    times = ("p50_ms", "p99_ms", "cpu_ms", "database_cpu_ms", "load_cpu_ms")
    header = ("", "offered/s", "answered/s", *times)
    rows = [
        (
            name,
            "all" if one.rate is None else f"{one.rate:.0f}",
            f"{one.per_s:.0f}",
            *(f"{getattr(one, each):.2f}" for each in times),
        )
        for name, phases in found.items()
        for one in phases
    ]
    print_table(f"{kind}: requests", header, rows)
    print_table(f"{kind}: pages", ("page", "ms"), [(p, f"{ms:.1f}") for p, ms in pages.items()])
    print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores", flush=True)


if __name__ == "__main__":
    asyncio.run(main(arguments()))
