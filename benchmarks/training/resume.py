"""kill -9 of the trainer process at random moments: is the result equal to an undisturbed run?

A real chain, real files, the real `muster trainer run`. One run is trained undisturbed, one under
kills: the versions' weights and all figures must be the same bit by bit, and every accepted record
be consumed exactly once.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

INTEGRATION = Path(__file__).parents[2] / "tests" / "integration"
sys.path[:0] = [str(INTEGRATION), str(INTEGRATION / "trainer")]

from benchmarks.report import machine, print_table, write  # noqa: E402
from trainer_kills import KillReport, kill_and_compare, killable  # noqa: E402

STEPS_PER_KILL = 2


async def measure(kills: int, seed: int) -> KillReport:
    """Return how a run of two steps per kill ended."""
    with tempfile.TemporaryDirectory() as name:
        async with killable(Path(name), steps=STEPS_PER_KILL * kills) as trainers:
            return await kill_and_compare(trainers, kills=kills, seed=seed)


def main() -> None:
    """Measure, print, write results/resume.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report = asyncio.run(measure(options.kills, options.seed))
    print_table(
        "A trainer killed at random moments, beside an undisturbed one",
        ["kills", "steps", "weights and figures identical", "records consumed once"],
        [
            [
                str(report.kills),
                str(STEPS_PER_KILL * report.kills),
                str(report.identical),
                str(report.consumed_once),
            ]
        ],
    )
    detail = {
        "kills": report.kills,
        "steps": STEPS_PER_KILL * report.kills,
        "killed_at_step_and_second_of_life": report.killed_at,
    }
    passed = report.identical and report.consumed_once
    write("resume", {"resume_identical": float(passed)}, detail, measured_on=machine())
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
