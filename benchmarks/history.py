"""Error rates of the sequential test over a worker's history, by simulation.

    make bench-history

Honest workers draw the strain of a submission of 128 samples from a beta-binomial law whose mean is
exactly the bound (as bad as honest workers may be) and whose spread varies; cheats draw from the
same law with a larger mean, from the first submission or after some honest ones. Writes
results/history.json.
"""

from __future__ import annotations

import statistics

import numpy as np
from report import machine, print_table, write

from muster.toploc.history import HistoryLimits, first_alarm

LIMITS = HistoryLimits(honest_strain=0.1, false_alarm=1e-3)
"""A bound that a simulation can see; the default false alarm of 1e-6 needs a log(1000) more."""
STRICT = HistoryLimits(honest_strain=0.1)

SAMPLES = 128
HONEST_WORKERS = 2000
HONEST_SUBMISSIONS = 500
CHEATS = 200


def strains(mean: float, together: float, count: int, random: np.random.Generator) -> list[float]:
    """Return submissions' strains; `together` is the correlation of a submission's samples."""
    spread = (1 - together) / together
    centres = random.beta(mean * spread, (1 - mean) * spread, count)
    drawn: list[float] = (random.binomial(SAMPLES, centres) / SAMPLES).tolist()
    return drawn


def false_alarms(together: float, random: np.random.Generator) -> int:
    """Return how many honest workers ever alarm."""
    return sum(
        first_alarm(strains(0.1, together, HONEST_SUBMISSIONS, random), LIMITS) is not None
        for _ in range(HONEST_WORKERS)
    )


def delays(mean: float, honest_before: int, random: np.random.Generator) -> list[int]:
    """Return after how many of its cheating submissions each cheat alarms, strictest bound."""
    found = []
    for _ in range(CHEATS):
        honest = strains(0.05, 0.02, honest_before, random)
        cheating = strains(mean, 0.02, 3000, random)
        alarm = first_alarm([*honest, *cheating], STRICT)
        found.append(3000 if alarm is None else max(0, alarm - honest_before))
    return found


def main() -> None:
    """Simulate, print, write."""
    random = np.random.default_rng(0)
    honest = {together: false_alarms(together, random) for together in (0.005, 0.05, 0.5)}
    rows = [
        [f"{together:g}", f"{alarms} of {HONEST_WORKERS}", f"{LIMITS.false_alarm:g}"]
        for together, alarms in honest.items()
    ]
    header = ["correlation within a submission", "honest workers that ever alarm", "bound"]
    print_table(f"False alarms in {HONEST_SUBMISSIONS} submissions at the bound", header, rows)
    power = {
        (mean, before): delays(mean, before, random)
        for mean in (0.15, 0.2, 0.3, 0.5, 0.9)
        for before in (0, 100, 1000)
    }
    rows = [
        [f"{mean:g}", str(before), f"{statistics.median(d):g}", str(sorted(d)[len(d) * 95 // 100])]
        for (mean, before), d in power.items()
    ]
    header = ["mean strain", "honest before", "median delay", "95 %"]
    print_table("Submissions until a cheat alarms, bound 0.1, false alarm 1e-6", header, rows)
    detail = {
        "honest": [{"together": t, "alarms": a, "of": HONEST_WORKERS} for t, a in honest.items()],
        "cheats": [
            {"mean": m, "honest_before": b, "median": statistics.median(d), "p95": sorted(d)[190]}
            for (m, b), d in power.items()
        ],
    }
    rate = max(honest.values()) / HONEST_WORKERS
    metrics = {"false_alarm_rate": rate, "delay_at_0.9": statistics.median(power[0.9, 0])}
    write("history", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    main()
