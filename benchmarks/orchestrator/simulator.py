"""The cost of networks of up to 10,000 workers and 100 validators, and the latency of verdicts.

Each size is played in a process of its own on the simulator (docs/scale.md): production programs,
virtual time. Every worker makes about one submission. Writes results/simulator.json and the chart
of docs/scale.md from whatever sizes are in it.
"""

import argparse
import gc
import json
import logging
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine, print_table, write

from muster.lab.simulator.figures import figures_of
from muster.lab.simulator.network import simulate
from muster.lab.simulator.scenario import Scenario
from muster.lab.simulator.world import World

ROOT = Path(__file__).parents[2]
SIZES = ((30, 5), (100, 10), (300, 20), (1000, 40), (3000, 60), (10_000, 100))
"""Workers and validators; a run has seats for 88."""


def scenario_of(workers: int, validators: int) -> Scenario:
    """Return a network: five minutes for a submission, a quarter of a second for a check."""
    return Scenario(
        seed=1,
        workers=workers,
        validators=validators,
        quorum=3,
        duration_s=430.0,
        generate_s=300.0,
        check_s=0.25,
        block_s=2.0,
        poll_s=6.0,
        heartbeat_s=60.0,
        retry_after_s=15.0,
        submissions_per_step=workers,
        lease_s=1200,
        batch_limit=128,
        # A validator that has not judged a batch after an eighth of the deadline counts as silent,
        # and others are called; in the largest network a validator has several batches waiting.
        outcome_deadline_s=600 if workers <= 3000 else 3600,
        commit_interval_s=2.0,
        checks_blocks=False,
    )


async def look(world: World) -> None:
    """Require that everything was judged, and nothing but accepted."""
    records = [r for batch in world.chain.state.batches.values() for r in batch.records]
    assert records, "no submission was judged"
    assert all(record.verdict == 1 for record in records), "honest work was not accepted"


def play(workers: int, validators: int) -> dict[str, Any]:
    """Play one size in this process and return its figures."""
    logging.disable(logging.CRITICAL)
    # Nearly all objects of a large network live until its end, so collection is pointless.
    gc.set_threshold(200_000, 20, 50)
    began, cpu = time.perf_counter(), time.process_time()
    figures = figures_of(simulate(scenario_of(workers, validators), look))
    figures["wall_s"] = round(time.perf_counter() - began, 1)
    figures["process_s"] = round(time.process_time() - cpu, 1)
    figures["memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    return figures


def _apart(workers: int, validators: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.orchestrator.simulator",
        "--one",
        str(workers),
        str(validators),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def save_scale(path: Path, sizes: list[dict[str, Any]]) -> None:
    """Write what simulated networks cost as PNG: latency, processor time and gas over workers.

    `sizes` are figures of `muster.lab.simulator.figures`, by rising number of workers.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workers = [size["workers"] for size in sizes]
    figure, (latency, cost, chain) = pyplot.subplots(1, 3, figsize=(12, 4), dpi=120)
    for name, colour in (("median", "#4c72b0"), ("p95", "#dd8452")):
        latency.plot(workers, [s["to_verdict_s"][name] for s in sizes], "o-", label=name, c=colour)
    latency.set(title="upload to verdict", ylabel="virtual seconds", ylim=(0, None))
    for kind in ("orchestrator", "validator", "worker"):
        each = [1000 * s["cpu_s"].get(kind, 0.0) / max(s["submissions"], 1) for s in sizes]
        cost.plot(workers, each, "o-", label=kind)
    cost.set(title="processor time per submission", ylabel="milliseconds", yscale="log")
    chain.plot(workers, [s["gas_per_submission"] for s in sizes], "o-", label="gas", c="#55a868")
    chain.set(title="chain per submission", ylabel="gas", yscale="log")
    for axes in (latency, cost, chain):
        axes.set(xlabel="workers", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _rows(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            f"{f['workers']:,}",
            str(f["validators"]),
            f"{f['submissions']:,}",
            f"{f['messages_per_submission']:.1f}",
            f"{f['gas_per_submission']:,.0f}",
            f"{f['to_verdict_s']['median']:.0f}",
            f"{f['to_verdict_s']['p95']:.0f}",
            f"{f['validators_load']['busy_mean']:.1%}",
            *(f"{_per(f, kind):.1f}" for kind in ("orchestrator", "validator", "worker")),
            f"{f['process_s']:.0f}",
            f"{f['memory_gb']:.2f}",
        ]
        for f in found
    ]


def _per(figures: dict[str, Any], kind: str) -> float:
    """Return the milliseconds of processor time per submission that a kind of process took."""
    took_ms: float = 1000 * figures["cpu_s"].get(kind, 0.0) / max(figures["submissions"], 1)
    return took_ms


HEADER = (
    "workers", "validators", "submissions", "messages each", "gas each", "verdict s", "95 % s",
    "validators busy", "orchestrator ms", "validator ms", "worker ms", "total CPU s", "GB",
)  # fmt: skip


def main() -> None:
    """Play the sizes that are asked for, keep those measured before, and write all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=2, type=int, help="Play one size and print its figures.")
    parser.add_argument("--up-to", type=int, default=10_000, help="Most workers.")
    parser.add_argument("--from", type=int, default=0, dest="least", help="Fewest workers.")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(play(*asked.one)))
        return
    path = RESULTS / "simulator.json"
    known = json.loads(path.read_text())["detail"] if path.exists() else []
    found = {f["workers"]: f for f in known}
    for workers, validators in SIZES:
        if asked.least <= workers <= asked.up_to:
            found[workers] = _apart(workers, validators)
            _write([found[size] for size in sorted(found)])


def _write(found: list[dict[str, Any]]) -> None:
    print_table("a network of production programs in virtual time", HEADER, _rows(found))
    most = found[-1]
    metrics = {
        "workers": most["workers"],
        "messages_per_submission": most["messages_per_submission"],
        "gas_per_submission": most["gas_per_submission"],
        "verdict_median_s": most["to_verdict_s"]["median"],
        "orchestrator_ms_per_submission": _per(most, "orchestrator"),
    }
    write("simulator", metrics, found, measured_on=machine())
    save_scale(ROOT / "docs" / "images" / "scale.png", found)


if __name__ == "__main__":
    main()
