"""Service to the honest while strangers, a node, files and relays are hostile.

    make bench-hostile                         all of it: some minutes, as root for the links
    python -m benchmarks.shardcast.hostile network       one part: network, files, relays, gangs

A part that is left out keeps its figures. Writes results/hostile.json.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.orchestrator import shopping
from benchmarks.report import RESULTS, machine, print_table, write

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from postgres_server import PostgresServer

from muster.lab.redteam.hostile.bad_files import bad_files, give
from muster.lab.redteam.hostile.network import Phase, play
from muster.lab.redteam.hostile.together import attack

SECONDS = 60.0
"""Of each phase of the network."""
PARTS = ("network", "files", "relays", "gangs")


def measure_network(seconds: float) -> tuple[dict[str, float], Any]:
    """Return how five workers and three validators are served on PostgreSQL, attacked or not."""
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as server:
        story = asyncio.run(
            play(Path(folder), attack, seconds=seconds, database_url=server.create())
        )
    phases = {"calm": story.calm, "attacked": story.attacked}
    rows = [
        [name, kind, f"{service.asked}", f"{100 * service.served:.2f} %",
         f"{service.percentile_ms(0.5):.0f}", f"{service.percentile_ms(0.99):.0f}",
         f"{phase.judged}"]
        for name, phase in phases.items()
        for kind, service in phase.service.items()
    ]  # fmt: skip
    header = ["", "request", "asked", "served", "median ms", "p99 ms", "submissions judged"]
    print_table(f"the hostile network, {seconds:.0f} s each", header, rows)
    metrics = {
        "honest_served_min": story.attacked.served_min,
        "honest_p99_ms": story.attacked.p99_ms_max,
        "honest_p99_ms_calm": story.calm.p99_ms_max,
        "judged_ratio": story.attacked.judged / max(1, story.calm.judged),
    }
    return metrics, {name: _told(phase) for name, phase in phases.items()}


def _told(phase: Phase) -> dict[str, Any]:
    service = {
        kind: {str(status): count for status, count in sorted(each.statuses.items())}
        for kind, each in phase.service.items()
    }
    return {"judged": phase.judged, "statuses": service, "attackers": dict(phase.answers)}


def measure_files() -> tuple[dict[str, float], Any]:
    """Return what the corpus of bad files costs a validator's decoder."""
    found = asyncio.run(give(bad_files().values()))
    header = ["bad files", "refused", "worst s", "longest pause s", "a child's MB"]
    row = [f"{found.files}", f"{found.refused}", f"{found.worst_s:.3f}", f"{found.stall_s:.3f}",
           f"{found.most_bytes / 1e6:.0f}"]  # fmt: skip
    print_table("files that cost more than their bytes", header, [row])
    metrics = {"bad_file_s": found.worst_s, "bad_file_mb": found.most_bytes / 1e6}
    return metrics, {"files": found.files, "refused": found.refused, "pause_s": found.stall_s}


def measure_relays() -> tuple[dict[str, float], Any]:
    """Return how much longer a fetch takes beside eight relays that drip; links are emulated."""
    script = "benchmarks.shardcast.shardcast_drip"
    subprocess.run([sys.executable, "-m", script, "--save"], check=True)
    saved = RESULTS / "shardcast_drip.json"
    document = json.loads(saved.read_text())
    saved.unlink()
    return {"drip_ratio": document["metrics"]["drip_ratio"]}, document["detail"]


def measure_gangs() -> tuple[dict[str, float], Any]:
    """Return what a tenth of the stake gains by picking its tickets, as one worker or as many."""
    found = {
        strategy: {number: shopping.measure(strategy, number) for number in shopping.IDENTITIES}
        for strategy in shopping.STRATEGIES
    }
    rows = [
        [strategy, f"{number}", f"{each['held']}", f"{each['data']:.1%}", f"{each['shift']:+.3f}"]
        for strategy, of_numbers in found.items()
        for number, each in of_numbers.items()
    ]
    header = ["attack", "identities", "held of 48", "of the data", "shift of the mean reward"]
    print_table("A tenth of the stake that picks its tickets", header, rows)
    picking = [each for name, of in found.items() if name != "honest" for each in of.values()]
    metrics = {
        "gang_held_max": max(each["held"] for each in picking),
        "gang_shift_max": max(each["shift"] for each in picking),
    }
    return metrics, found


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", default=PARTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    metrics, detail = _earlier()
    measures = {
        "network": lambda: measure_network(options.seconds),
        "files": measure_files,
        "relays": measure_relays,
        "gangs": measure_gangs,
    }
    for part in options.parts:
        found, detail[part] = measures[part]()
        metrics |= found
    write("hostile", metrics, detail, measured_on=machine())


def _earlier() -> tuple[dict[str, float], dict[str, Any]]:
    path = RESULTS / "hostile.json"
    if not path.exists():
        return {}, {}
    document = json.loads(path.read_text())
    return document["metrics"], document["detail"]


if __name__ == "__main__":
    main()
