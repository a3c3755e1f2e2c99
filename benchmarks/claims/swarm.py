"""Unreliable and unequal workers, and broadcasts during work: production programs, virtual time.

Two networks of `muster.lab.simulator` (docs/scale.md):

* a swarm: half of the workers ten times slower, and a third of all nodes, validators too, killed in
  every minute; against the same network with equal workers that nobody kills;
* INTELLECT-2's schedule of TARGET-SHORT: 14 minutes to fetch a policy, 22 to sample a step, 22 to
  train one; for rollouts that may be 0, 1, 2 and 4 versions old.
"""

from dataclasses import replace
from typing import Any

from benchmarks.claims.study import Study
from benchmarks.report import drawing, print_table

from muster.lab.simulator.figures import figures_of
from muster.lab.simulator.invariants import hold
from muster.lab.simulator.network import simulate
from muster.lab.simulator.scenario import Scenario

MINUTE = 60.0
EQUAL = Scenario(
    seed=1,
    workers=24,
    validators=5,
    quorum=3,
    duration_s=8 * MINUTE,
    generate_s=20.0,
    check_s=0.25,
    submissions_per_step=24,
    lease_s=600,
    loops=2,
    checks_blocks=False,
)
# A life of three minutes on average: of every three nodes one dies in a minute.
SWARM = replace(EQUAL, slow_share=0.5, slow_factor=10.0, churn_s=3 * MINUTE)
SHORT = replace(
    EQUAL,
    workers=6,
    duration_s=4 * 60 * MINUTE,
    generate_s=22 * MINUTE / 4,
    fetch_s=14 * MINUTE,
    train_s=22 * MINUTE,
    submissions_per_step=24,
    lease_s=2 * 3600,
    outcome_deadline_s=3600,
    heartbeat_s=60.0,
    poll_s=6.0,
)
LEVELS = (0, 1, 2, 4)


def play(scenario: Scenario) -> dict[str, Any]:
    """Play a network, require that its invariants hold, and return its figures."""
    world = simulate(scenario, hold)
    figures = figures_of(world)
    minutes = scenario.duration_s / MINUTE
    versions = figures["transactions"]["publish"] - 1
    kills = sum(line.split(" ", 1)[1].startswith("killed worker") for line in world.history)
    return {
        "steps_per_minute": versions / minutes,
        "submissions_per_minute": figures["submissions"] / minutes,
        "worker_kills_per_minute": kills / minutes,
        "doing": figures["workers_doing"],
        "verdicts": figures["verdicts"],
        "lost": figures["submissions"] - figures["verdicts"]["accepted"],
        "digest": figures["digest"],
    }


def measure() -> Study:
    """Play all networks, print and draw."""
    levels = {level: play(replace(SHORT, max_async_level=level)) for level in LEVELS}
    return study_of(play(EQUAL), play(SWARM), levels)


def study_of(
    equal: dict[str, Any], swarm: dict[str, Any], levels: dict[int, dict[str, Any]]
) -> Study:
    """Print and draw what networks did, and return their figures."""
    _print(equal, swarm, levels)
    _draw(levels)
    metrics = {
        "swarm_steps_per_minute": swarm["steps_per_minute"],
        "equal_steps_per_minute": equal["steps_per_minute"],
        "swarm_kills_per_minute": swarm["worker_kills_per_minute"],
        "swarm_submissions": float(swarm["verdicts"]["accepted"]),
        "swarm_lost": float(swarm["lost"]),
    }
    for level, found in levels.items():
        metrics[f"weights_wait_level_{level}"] = found["doing"].get("fetching", 0.0)
        metrics[f"generating_level_{level}"] = found["doing"].get("generating", 0.0)
        metrics[f"steps_per_hour_level_{level}"] = 60 * found["steps_per_minute"]
    by_level = {str(level): found for level, found in levels.items()}
    return Study(metrics, {"equal": equal, "swarm": swarm, "levels": by_level})


def _print(equal: dict[str, Any], swarm: dict[str, Any], levels: dict[int, dict[str, Any]]) -> None:
    header = ["network", "steps a minute", "submissions a minute", "workers killed a minute"]
    figures = ("steps_per_minute", "submissions_per_minute", "worker_kills_per_minute")
    rows = [
        [name, *(f"{found[figure]:.2f}" for figure in figures)]
        for name, found in (("equal workers", equal), ("swarm", swarm))
    ]
    print_table("24 workers, virtual time", header, rows)
    states = sorted({state for found in levels.values() for state in found["doing"]})
    rows = [
        [
            str(level),
            f"{60 * found['steps_per_minute']:.2f}",
            *(f"{found['doing'].get(state, 0):.1%}" for state in states),
        ]
        for level, found in levels.items()
    ]
    print_table("TARGET-SHORT's schedule", ["versions old", "steps an hour", *states], rows)


def _draw(levels: dict[int, dict[str, Any]]) -> None:
    with drawing("claims-broadcast") as axes:
        below = [0.0] * len(levels)
        for state in ("generating", "fetching", "idle"):
            shares = [found["doing"].get(state, 0.0) for found in levels.values()]
            label = {"fetching": "waiting for weights", "idle": "without work"}.get(state, state)
            axes.bar([str(level) for level in levels], shares, bottom=below, label=label)
            below = [a + b for a, b in zip(below, shares, strict=True)]
        axes.set(xlabel="versions that a rollout may be old", ylabel="share of workers' time")
        axes.legend(loc="lower right")
