"""An orchestrator that is started, loaded and measured, phase by phase."""

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from benchmarks.orchestrator.orchestrator_load import Outcome, drive
from benchmarks.orchestrator.orchestrator_node import Stage

STAGE = "benchmarks.orchestrator.orchestrator_stage"
START_S = 3600

Place = tuple[str, int | None]
"""A database's file or URL, and the first process of its server, if it has one."""


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
    stolen_percent: float
    """Share of the machine's CPU time stolen by its host."""
    disk_percent: float
    """Share of the machine's CPU time spent waiting for the disk."""

    @property
    def per_cpu_s(self) -> float:
        """Requests per CPU second of the process; its clock is too coarse for a few requests."""
        return 1000 / max(self.cpu_ms, 0.001)


@contextlib.contextmanager
def staged(
    folder: Path, options: argparse.Namespace, databases: Mapping[str, Place]
) -> Iterator[Iterator[tuple[str, Stage]]]:
    """Yield an orchestrator on each database in turn; each one runs until the next is requested.

    `options` say how many workers and submissions it has.
    """
    command = [sys.executable, "-m", STAGE, str(folder), *(name for name, _ in databases.values())]
    command += ["--workers", str(options.workers), "--submissions", str(options.submissions)]
    process = subprocess.Popen(command)
    try:
        yield _each(folder, process, options.workers, databases)
    finally:
        process.terminate()
        process.wait(60)


def _each(
    folder: Path,
    process: subprocess.Popen[bytes],
    workers: int,
    databases: Mapping[str, Place],
) -> Iterator[tuple[str, Stage]]:
    for number, (kind, (database, server_pid)) in enumerate(databases.items()):
        deadline = time.monotonic() + START_S
        while not (folder / f"{number}.ready").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("error: the orchestrator did not start")
            time.sleep(0.1)
        known = {"database": database, "pid": process.pid, "server_pid": server_pid}
        yield kind, Stage.read(folder, number, workers=workers, **known)
        process.send_signal(signal.SIGTERM)


async def measure(
    stage: Stage, requests: Sequence[bytes], rate: float | None, taken: Collection[int] = (200, 202)
) -> tuple[Measured, Outcome]:
    """Send requests; all of them must be answered with one of these statuses."""
    before, own, times = stage.cpu_s(), time.process_time(), psutil.cpu_times()
    outcome = await drive(stage.url, requests, rate=rate)
    spent = [now - then for now, then in zip(stage.cpu_s(), before, strict=True)]
    own, count = time.process_time() - own, len(requests)
    of_machine = [now - then for now, then in zip(psutil.cpu_times(), times, strict=True)]
    passed = dict(zip(times._fields, of_machine, strict=True))
    if set(outcome.statuses) - set(taken):
        raise SystemExit(f"error: the orchestrator refused some requests: {dict(outcome.statuses)}")
    measured = Measured(
        rate=rate,
        per_s=outcome.per_s,
        p50_ms=outcome.percentile_ms(0.5),
        p99_ms=outcome.percentile_ms(0.99),
        cpu_ms=1000 * spent[0] / count,
        database_cpu_ms=1000 * spent[1] / count,
        load_cpu_ms=1000 * own / count,
        stolen_percent=100 * passed["steal"] / sum(of_machine),
        disk_percent=100 * passed["iowait"] / sum(of_machine),
    )
    return measured, outcome


async def measure_pages(stage: Stage, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each page."""
    times: dict[str, list[float]] = {name: [] for name in stage.pages}
    async with httpx.AsyncClient(base_url=stage.url, timeout=60, trust_env=False) as http:
        for _ in range(rounds):
            for name, path in stage.pages.items():
                started = time.perf_counter()
                (await http.get(path)).raise_for_status()
                times[name].append(1000 * (time.perf_counter() - started))
            # Wait until short-lived caches expire, so that they do not hide the cost of a page.
            await asyncio.sleep(0.5)
    return {name: statistics.median(each) for name, each in times.items()}
