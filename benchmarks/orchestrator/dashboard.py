"""The cost of the dashboard's pages with 10,000 workers and 1,000,000 submissions in the database.

    make bench-dashboard

Every page is fetched over loopback from an orchestrator that serves a synthetic history on SQLite;
the first paint is what Chromium reports of the run's page. Writes results/dashboard.json.
"""

import argparse
import asyncio
import gc
import itertools
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from benchmarks.report import machine, print_table, write

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "orchestrator"))

from browser import open_browser, open_page
from dashboard_stage import History, evaluation_figures, served, store, training_figures
from orchestrator_bench import open_bench
from orchestrator_fakes import Network

from muster.orchestrator.dashboard.training import keep_figures
from muster.orchestrator.db import Database
from muster.orchestrator.http.quotas import PAGE_SHARE
from muster.orchestrator.metrics import FRESH_S, MetricsText
from muster.orchestrator.projection import Projection
from muster.protocol.messages import Verdict
from muster.protocol.recipe import TrainingRecipe

ROUNDS = 7
CHUNK = 50_000
STEPS = 1000
LIMIT_MS = 200.0
LIMIT_PAINT_MS = 1000.0


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--submissions", type=int, default=1_000_000)
    return parser.parse_args()


async def fill(folder: Path, history: History, submissions: int) -> None:
    """Write the history, chunk by chunk, so that no more than one is held as rows."""
    done = 0
    async with open_bench(folder, Network()) as first:
        while done < submissions:
            count = min(CHUNK, submissions - done)
            steps = max(1, STEPS * count // submissions)
            history.work(count, steps=steps, after=done * STEPS // submissions, cheaters=40)
            done += count
            await store(history, first, beats=done == submissions, lease=done == submissions)
            history.take()
            if done == submissions:
                await report_training(first.services.database)
            print(f"{done:,} submissions", flush=True)


async def report_training(database: Database) -> None:
    """Write a long training run's figures, as the database holds them."""
    rows: list[dict[str, Any]] = [
        {"step": step, "figures": training_figures(step, STEPS)} for step in range(1, STEPS)
    ]
    for row in rows[::10]:
        row["figures"] = {**row["figures"], **evaluation_figures(row["step"], STEPS)}
    async with database.transaction() as asked:
        await asked.ask(*(keep_figures(row["step"], row["figures"], 0) for row in rows))


def pages(projection: Projection) -> dict[str, str]:
    """Return the pages to measure: lists at both ends, and the longest page of each other kind."""
    accepted = projection.judged_with(Verdict.ACCEPTED)
    busiest = max(
        projection.view.workers.values(), key=lambda w: projection.tally(w.worker_id).units
    ).address
    middle = f"0x{accepted[len(accepted) // 2].record.file_hash.hex()}"
    return {
        "run": "/",
        "workers by units": "/workers",
        "workers, last page": f"/workers?order=paid&after={len(projection.view.workers) - 50}",
        "worker": f"/workers/{busiest}",
        "submissions": "/submissions",
        "submissions, from the middle": f"/submissions?before={len(accepted) // 2}",
        "of a worker": f"/submissions?worker={busiest}",
        "of a step": "/submissions?step=500",
        "accepted, from the middle": f"/submissions?verdict=accepted&before={len(accepted) // 2}",
        "frauds": "/submissions?verdict=fraud",
        "frauds of a step": "/submissions?verdict=fraud&step=500",
        "rejected of a worker": f"/submissions?verdict=rejected&worker={busiest}",
        "submission": f"/submissions/{middle}",
        "cases": "/cases",
        "network": "/network",
        "status as JSON": "/v1/status",
        "metrics": "/metrics",
    }


async def measure(fetch: Callable[[], Awaitable[httpx.Response]]) -> tuple[float, float, int]:
    """Return median wall and CPU milliseconds of a page, and its bytes."""
    walls: list[float] = []
    costs: list[float] = []
    size = 0
    for _ in range(ROUNDS):
        # Wait until short-lived caches expire, so that they do not hide the cost of a page, and
        # pages had less than their share of the time, so that they do not wait for it.
        await asyncio.sleep(max(0.25, sum(walls[-1:]) / 1000 / PAGE_SHARE))
        started, cpu = time.perf_counter(), time.process_time()
        response = await fetch()
        walls.append(1000 * (time.perf_counter() - started))
        costs.append(1000 * (time.process_time() - cpu))
        assert response.status_code == 200, response.text[:200]
        size = len(response.content)
    return statistics.median(walls), statistics.median(costs), size


async def first_paint(url: str) -> float:
    """Return the median milliseconds until Chromium paints the run's page, cold."""
    paints: list[float] = []
    async with open_browser() as browser:
        for _ in range(7):
            async with open_page(browser) as visit:
                await visit.page.goto(url, wait_until="load")
                paints.append(
                    await visit.page.evaluate(
                        "new Promise(done => new PerformanceObserver(list => done("
                        "list.getEntriesByName('first-contentful-paint')[0].startTime))"
                        ".observe({type: 'paint', buffered: true}))"
                    )
                )
    return statistics.median(paints)


async def run(folder: Path, options: argparse.Namespace) -> None:
    """Fill, serve, measure, print, write."""
    training = TrainingRecipe(steps=0, submissions_per_step=1000, max_async_level=2)
    history = History(Network(training=training))
    history.register(options.workers)
    started = time.process_time()
    # A history has no garbage, and collection would take longer than writing it.
    gc.disable()
    await fill(folder, history, options.submissions)
    history.fund_and_pay()
    filled_s = time.process_time() - started
    async with open_bench(folder, history.network) as bench:
        bench.wall.time = history.network.chain.time + 10
        bench.services.chain_clock.update(history.network.chain.time)
        # Under this clock no answer is kept, so that every round builds one.
        bench.services.metrics_text = MetricsText(itertools.count(step=FRESH_S).__next__)
        # As the process does, see muster.orchestrator.process.
        gc.freeze()
        gc.enable()
        found: dict[str, tuple[float, float, int]] = {}
        async with served(bench) as url:
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                for name, path in pages(bench.services.projection).items():
                    found[name] = await measure(lambda path=path: http.get(path))  # type: ignore[misc]
            paint_ms = await first_paint(url)
        database_mb = (folder / "orchestrator.sqlite3").stat().st_size / 1e6
    report(options, found, paint_ms, database_mb, filled_s)


def report(
    options: argparse.Namespace,
    found: dict[str, tuple[float, float, int]],
    paint_ms: float,
    database_mb: float,
    filled_s: float,
) -> None:
    """Print the table and write the results."""
    rows = [
        [name, f"{wall:.1f}", f"{cpu:.1f}", f"{size / 1000:.0f}"]
        for name, (wall, cpu, size) in found.items()
    ]
    rows.append(["first paint of the run", f"{paint_ms:.0f}", "", ""])
    header = ["page", f"ms (must: {LIMIT_MS:.0f})", "CPU ms", "kB"]
    title = f"{options.workers:,} workers, {options.submissions:,} submissions, SQLite"
    print_table(title, header, rows)
    metrics = {
        "page_ms_max": round(max(wall for wall, _, _ in found.values()), 1),
        "page_cpu_ms_max": round(max(cpu for _, cpu, _ in found.values()), 1),
        "page_kb_max": round(max(size for _, _, size in found.values()) / 1000, 1),
        "first_paint_ms": round(paint_ms, 1),
    }
    detail = {
        "workers": options.workers,
        "submissions": options.submissions,
        "rounds": ROUNDS,
        "limits": {"page_ms_max": LIMIT_MS, "first_paint_ms": LIMIT_PAINT_MS},
        "pages": {
            name: {"ms": round(wall, 2), "cpu_ms": round(cpu, 2), "bytes": size}
            for name, (wall, cpu, size) in found.items()
        },
        "database_mb": round(database_mb, 1),
        "filled_cpu_s": round(filled_s, 1),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, 1),
    }
    write("dashboard", metrics, detail, measured_on=machine())


def main() -> None:
    """Measure in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), arguments()))


if __name__ == "__main__":
    main()
