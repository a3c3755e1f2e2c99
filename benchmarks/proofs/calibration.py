"""Calibrations of trained models in two number formats: detection of forgers and cheats.

    make bench-calibration                      all of them, about an hour of one core
    python -m benchmarks.proofs.calibration 2x64:float32

Builds the models of `base_models.py` under benchmarks/.models where they are missing, calibrates
each on prompts of their own corpus, draws detection against strength into docs/images, and keeps
the measurements in results/calibration.json, case by case.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from benchmarks.proofs import base_models
from benchmarks.report import HERE, RESULTS, machine, print_table, write
from matplotlib import pyplot

from muster.client.calibration import series_of
from muster.inference.calibrate import CalibrationRun, calibrate_model
from muster.inference.calibrated_limits import detection, submission_size
from muster.inference.calibration_plan import MeasuringPlan, Profile
from muster.protocol.intervals import rate_bound, wilson
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc.calibration import Measurement

matplotlib.use("svg")
# Makes the files reproducible.
matplotlib.rcParams["svg.hashsalt"] = "muster"
matplotlib.rcParams["svg.fonttype"] = "none"
MODELS = HERE / ".models"
IMAGES = HERE.parent / "docs/images"

RECIPE = Recipe(
    name="calibration",
    sampling=SamplingRecipe(
        problems_per_submission=8, samples_per_problem=16, temperature=1.0, max_new_tokens=64
    ),
    training=TrainingRecipe(submissions_per_step=4, learning_rate=1e-6),
)

CASES: dict[str, tuple[str, Profile, dict[str, str]]] = {
    "2x64:float32": ("2x64", "full", {}),
    "2x64:bfloat16": ("2x64", "full", {}),
    "2x128:bfloat16": ("2x128", "full", {}),
    "4x256:float32": ("4x256", "full", {"sibling 2x128": "2x128"}),
    "4x256:bfloat16": ("4x256", "full", {"sibling 2x128": "2x128"}),
    "8x512:float32": ("8x512", "quick", {"sibling 4x256": "4x256"}),
    "8x512:bfloat16": ("8x512", "quick", {"sibling 4x256": "4x256"}),
}
"""Model, profile and cheaper models of every case."""


def folder_of(name: str) -> Path:
    """Return a model's folder, built where it is missing."""
    folder = MODELS / name
    if not (folder / "model.safetensors").exists():
        print(f"building {name}", flush=True)
        base_models.build(base_models.SIZES[name], folder)
    return folder


def measure(case: str, samples: int) -> dict[str, Any]:
    """Return one case's findings, and draw them."""
    name, profile, others = CASES[case]
    rng = random.Random(1)
    plan = MeasuringPlan(
        RECIPE,
        [base_models.prompt(rng) for _ in range(64)],
        (f"transformers:{case.split(':')[1]}",),
        {label: folder_of(other) for label, other in others.items()},
        profile,
        samples,
    )
    started_s = time.process_time()
    run = calibrate_model(folder_of(name), plan, progress=lambda m: print(case, m, flush=True))
    IMAGES.mkdir(exist_ok=True)
    picture = IMAGES / f"calibration-{case.replace(':', '-')}.svg"
    save_drawing(picture, run.table, RECIPE, f"{name}, {plan.engines[0]}")
    return _findings(run, profile, time.process_time() - started_s)


def save_drawing(path: Path, measured: Sequence[Measurement], recipe: Recipe, title: str) -> None:
    """Plot detection against the strength of cheats, as SVG.

    Left: the share of detected samples, against the distance of the cheat's model from the policy.
    Right: the share of detected submissions, per cheat.
    """
    rows = [r for r in measured if r.judged == "sample" and r.kind in ("cheap", "other")]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 1.2 + 0.24 * len(rows)), width_ratios=(3, 2), layout="constrained"
    )
    _draw_power(left, [row for row in rows if row.strength])
    _draw_submissions(right, rows, submission_size(recipe))
    figure.suptitle(title)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_power(axes: Any, rows: Sequence[Measurement]) -> None:
    for label in dict.fromkeys(map(series_of, rows)):
        members = sorted((r for r in rows if series_of(r) == label), key=lambda r: r.strength or 0)
        shares = [1 - r.accepted / r.trials for r in members]
        bounds = [wilson(r.trials - r.accepted, r.trials) for r in members]
        errors = [
            [max(0.0, s - low) for s, (low, _) in zip(shares, bounds, strict=True)],
            [max(0.0, high - s) for s, (_, high) in zip(shares, bounds, strict=True)],
        ]
        style = "o-" if len(members) > 1 else "s"
        axes.errorbar(
            [r.strength for r in members], shares, yerr=errors, fmt=style, label=label, capsize=2
        )
    axes.set(
        xscale="log",
        xlabel="KL divergence from the policy, nats per token",
        ylabel="samples noticed",
        ylim=(-0.03, 1.03),
    )
    axes.grid(alpha=0.3)
    if rows:
        axes.legend(fontsize="small", loc="lower right")


def _draw_submissions(axes: Any, rows: Iterable[Measurement], size: int) -> None:
    ordered = sorted(rows, key=lambda r: r.accepted / r.trials, reverse=True)
    bounds = [detection(row, size) for row in ordered]
    places = range(len(ordered))
    axes.barh(places, [low for low, _ in bounds], color="#4c72b0")
    axes.barh(
        places, [high - low for low, high in bounds], left=[low for low, _ in bounds], alpha=0.3
    )
    axes.set_yticks(places, [row.name for row in ordered], fontsize="small")
    axes.set(xlim=(0, 1), xlabel=f"submissions of {size} noticed (pale: 95 % interval)")


def _findings(run: CalibrationRun, profile: str, cpu_s: float) -> dict[str, Any]:
    honest = [row for row in run.table if row.kind == "honest"]
    trials = sum(row.trials for row in honest)
    size = submission_size(RECIPE)
    return {
        "profile": profile,
        "cpu_s": round(cpu_s),
        "refusal": None if run.refusal is None else str(run.refusal),
        "limits": run.calibration.model_dump(mode="json", include={"chunk", "sampler", "history"}),
        "fraud_strikes": run.calibration.fraud_strikes,
        "honest": {
            "pairs": len(honest),
            "samples": trials,
            "failed": trials - sum(row.accepted for row in honest),
            "rate_below": rate_bound(trials),
            "worst_mean": max(row.mantissa_error_mean for row in honest),
            "worst_margin": max(row.margin for row in honest),
            "worst_strain": max(row.strain for row in honest),
        },
        "cheats": [
            {
                "name": row.name,
                "kind": row.kind,
                "trials": row.trials,
                "accepted": row.accepted,
                "by_proofs": row.failed_proofs,
                "by_sampling": row.failed_sampling,
                "strain": row.strain,
                "nats_per_token": row.strength,
                "submissions_noticed": detection(row, size),
            }
            for row in run.table
            if row.kind != "honest"
        ],
    }


def main() -> None:
    """Measure the cases asked for and print all that are known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--samples", type=int, default=320)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for case in given.cases:
        found = measure(case, given.samples)
        # Read the file again: cases may run in parallel.
        known = {**_known(), case: found}
        write("calibration", _metrics(known), known, measured_on=machine())
    header = ["case", "cheat", "samples noticed", "submissions noticed, at least"]
    print_table("What cheats achieve", header, _rows(_known()))


def _known() -> dict[str, Any]:
    path = RESULTS / "calibration.json"
    return json.loads(path.read_text())["detail"] if path.exists() else {}


def _metrics(known: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the models that were not refused."""
    kept = [found for found in known.values() if found["refusal"] is None]
    cheats = [cheat for found in kept for cheat in found["cheats"]]
    nothing = [cheat["accepted"] for cheat in cheats if cheat["kind"] == "nothing"]
    cheap = [c["submissions_noticed"][0] for c in cheats if c["kind"] == "cheap"]
    honest = sum(found["honest"]["samples"] for found in known.values())
    return {
        "refused": len(known) - len(kept),
        "forger_accepts": max(nothing, default=0),
        "cheap_detected_min": min(cheap, default=1.0),
        "honest_failed": sum(found["honest"]["failed"] for found in known.values()),
        "honest_rate_below": rate_bound(honest),
    }


def _rows(known: dict[str, Any]) -> list[list[str]]:
    return [
        [
            case,
            cheat["name"],
            f"{1 - cheat['accepted'] / cheat['trials']:.1%} of {cheat['trials']}",
            f"{cheat['submissions_noticed'][0]:.1%}",
        ]
        for case, found in known.items()
        for cheat in found["cheats"]
    ]


if __name__ == "__main__":
    main()
