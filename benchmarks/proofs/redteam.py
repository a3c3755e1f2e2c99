"""The red team's figures: forgers accepted, the worst detection, honest rollouts rejected.

    make bench-redteam                           the full run: half an hour of one core
    python -m benchmarks.proofs.redteam --trials 30 --honest 3000

Plays what `muster redteam --full` plays, writes its page and drawings too, and goes on with the
trials that runs/redteam/trials.jsonl holds. Writes results/redteam.json.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import machine, print_table, write

from muster.lab.redteam.catalogue import ATTACKS
from muster.lab.redteam.honest import (
    WANTED,
    HonestResult,
    conclude_honest,
    play_honest,
    read_judged,
)
from muster.lab.redteam.report import PAGE, code, draw_curves, this_run, write_page
from muster.lab.redteam.runner import read_trials, run
from muster.lab.redteam.stage import Stage
from muster.lab.redteam.trials import AttackResult

FOLDER = Path("runs/redteam")
RECORD = FOLDER / "trials.jsonl"


def play(trials: int | None, honest: int) -> tuple[Stage, list[AttackResult], HonestResult]:
    """Return what the suite says, trials of the record included."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    stage = Stage(FOLDER)
    earlier, judged = read_trials(RECORD), read_judged(RECORD)
    with RECORD.open("a", buffering=1) as record:
        results = run(
            stage, ATTACKS.values(), size="full", trials=trials, earlier=earlier, record=record
        )
        for one in play_honest(stage, honest, done=judged):
            judged.append(one)
            record.write(json.dumps(one.line()) + "\n")
    stage.close()
    return stage, results, conclude_honest(judged)


def metrics_of(
    stage: Stage, results: Sequence[AttackResult], honest: HonestResult
) -> dict[str, float]:
    """Return the design's figures.

    A forger is tried on every chunk of the calibration (300 or more each) and in submissions (A6).
    """
    on_chunks = [row.accepted for row in stage.calibration.measured if row.kind == "nothing"]
    a6 = next(r for r in results if r.attack.id == "A6")
    shares = [
        v.caught / v.trials
        for r in results
        if r.attack.kind != "economic"
        for v in r.counted
        if v.trials
    ]
    return {
        "forger_accepts": max([a6.trials - a6.caught, *on_chunks]),
        "detected_min": min(shares),
        "false_positive_upper": honest.false_positive_upper,
        "honest_rollouts": honest.rollouts,
        "honest_rejected": honest.rejected,
        "attacks": len(results),
        "defences_failed": sum(bool(r.failure) for r in results),
        "profit_max_economic": max(r.profit for r in results if r.attack.kind == "economic"),
    }


def _detail(result: AttackResult) -> dict[str, Any]:
    low, high = result.interval
    return {
        "attack": result.attack.id,
        "title": result.attack.title,
        "kind": result.attack.kind,
        "trials": result.trials,
        "caught": result.caught,
        "interval": [round(low, 4), round(high, 4)],
        "found_after": round(result.found_after, 3),
        "unit": result.attack.time_unit,
        "profit": round(result.profit, 4),
        "profit_interval": [round(bound, 4) for bound in result.profit_interval],
        "profits_measured": result.measured,
        "failure": result.failure,
    }


def main() -> None:
    """Play, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, help="trials of each attack [the attacks' own]")
    parser.add_argument("--honest", type=int, default=WANTED, help="honest rollouts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("muster").setLevel(logging.CRITICAL)
    # Read before anything is written: files of this run must not mark its commit as changed.
    commit = code()
    stage, results, honest = play(given.trials, given.honest)
    detail = [_detail(result) for result in results]
    header = ["attack", "kind", "trials", "caught", "profit", "failure"]
    print_table("Red team", header, [[str(row[name]) for name in header] for row in detail])
    draw_curves(results)
    write_page(PAGE, results, honest, this_run(stage.terms, machine(), commit))
    write(
        "redteam", metrics_of(stage, results, honest), detail, measured_on=machine(), commit=commit
    )


if __name__ == "__main__":
    main()
