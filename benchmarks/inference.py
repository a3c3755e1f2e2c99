"""Sampling by the transformers engine against TRL's generation.

    make bench-inference

Completion tokens per CPU second, one thread, float32: `TransformersEngine.generate`, proofs and
verifiable sampling included, against the generation of TRL's GRPOTrainer. Same model (Qwen3,
4 x 256, 3.28 M parameters), 4 prompts x 8 samples per call, the same lognormal lengths: ours by
each request's limit, TRL's by a logits processor that ends rows at their lengths. Each side is a
process of its own; they take their calls in turn, one to warm up, seven counted. Ratios are of
medians.

Writes results/inference.json. The share of proofs is in results/toploc.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, print_table, write
from trl_work import LONGEST, TRL, Side, build_model, draw_step

from muster.inference.engine import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

OURS = [sys.executable, str(Path(__file__))]
STEPS = 8
"""Calls of each side; the first warms up."""
OPTIONS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "16 rows": {"max_rows": 16},
    "own forward pass": {"lean": False},
}
"""Ours with room for all samples, with places that finished rows leave to the next samples, and
through the forward pass of transformers, as architectures that are not known are decoded."""


def measure_ours(request: dict[str, Any]) -> None:
    """Generate a step for every line of input and print its CPU seconds."""
    engine = TransformersEngine("float32", **request["options"])
    engine.load_policy(Path(request["model"]), PolicyVersion(0))
    for step in request["work"]:
        rows = [row for group in step for row in group]
        asked = [
            Request(tuple(row["prompt"]), seed, 1.0, len(row["completion"]))
            for seed, row in enumerate(rows)
        ]
        sys.stdin.readline()
        started = time.process_time()
        made = engine.generate(asked, proof=ProofRecipe())
        seconds = time.process_time() - started
        # A random model ends a few completions early: the time counts per token of the work.
        share = sum(len(c.tokens) for c in made) / sum(len(row["completion"]) for row in rows)
        print(f"step_s {seconds / share}", flush=True)


def main() -> None:
    """Measure both sides in turn, print it, write it."""
    found: dict[str, list[float]] = {name: [] for name in (*OPTIONS, "trl")}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = build_model(scratch / "model")
        work = [draw_step(step, is_fixed=False) for step in range(STEPS)]
        request = {"what": "sample", "model": str(model), "dtype": "float32", "work": work}
        sides = {"trl": Side(TRL, {**request, "micro": 8, "longest": LONGEST}, scratch / "trl")}
        for name, options in OPTIONS.items():
            sides[name] = Side(OURS, {**request, "options": options}, scratch / name)
        for i, step in enumerate(work):
            for side, process in sides.items():
                rate = sum(len(row["completion"]) for g in step for row in g) / process.step()
                if i:
                    found[side].append(rate)
        for process in sides.values():
            process.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    print_table(
        "completion tokens per CPU second, Qwen3 4 x 256, 4 prompts x 8, lognormal, float32",
        ["side", "tokens / CPU s", "over TRL"],
        [
            [name, f"{value:,.0f}", f"{value / medians['trl']:.2f}"]
            for name, value in medians.items()
        ],
    )
    metrics = {
        "sampling_ratio": medians["all at once"] / medians["trl"],
        "sampling_ratio_16_rows": medians["16 rows"] / medians["trl"],
        "sampling_ratio_own_forward": medians["own forward pass"] / medians["trl"],
    }
    detail = {"tokens_per_cpu_s": found, "load": os.getloadavg()}
    write("inference", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        measure_ours(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        main()
