"""Sampling by the transformers engine against TRL's generation, and against vLLM.

    make bench-inference

Completion tokens per CPU second, one thread, float32: `TransformersEngine.generate`, proofs and
verifiable sampling included, against the generation of TRL's GRPOTrainer. Same model (Qwen3,
4 x 256, 3.28 M parameters), 4 prompts x 8 samples per call, the same lognormal lengths: ours by
each request's limit, TRL's by a logits processor that ends rows at their lengths. Each side is a
process of its own; they take their calls in turn, one to warm up, seven counted. Ratios are of
medians. Where vLLM is installed (`make vllm`), both engines then generate 64 samples per call, in
the same way; the CPU seconds are those of an engine's processes.

Writes results/inference.json. The share of proofs is in results/toploc.json.
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.report import machine, print_table, write
from benchmarks.training.trl_work import LONGEST, TRL, Side, build_model, draw_step

from muster.inference.engine import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.inference.vllm.launcher import find_python
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

OURS = [sys.executable, "-m", "benchmarks.inference.inference"]
STEPS = 8
"""Calls of each side; the first warms up."""
OPTIONS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "16 rows": {"max_rows": 16},
    "own forward pass": {"lean": False},
}
"""Ours with room for all samples, with rows that are refilled when samples finish, and with the
forward pass of transformers, which decodes unknown architectures."""


def measure_ours(request: dict[str, Any]) -> None:
    """Generate a step for every line of input and print its CPU seconds."""
    engine_class = VllmEngine if request["engine"] == "vllm" else TransformersEngine
    engine = engine_class("float32", **request["options"])
    engine.load_policy(Path(request["model"]), PolicyVersion(0))
    for step in request["work"]:
        rows = [row for group in step for row in group]
        asked = [
            Request(tuple(row["prompt"]), seed, 1.0, len(row["completion"]))
            for seed, row in enumerate(rows)
        ]
        sys.stdin.readline()
        started = cpu_s()
        made = engine.generate(asked, proof=ProofRecipe())
        seconds = cpu_s() - started
        # A random model ends a few completions early, so time is counted per generated token.
        share = sum(len(c.tokens) for c in made) / sum(len(row["completion"]) for row in rows)
        print(f"step_s {seconds / share}", flush=True)


def cpu_s() -> float:
    """Return the CPU seconds that this process and its children have taken."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + math.fsum(t.user + t.system for t in times)


Found = dict[str, list[float]]
"""Completion tokens per CPU second, by side."""


def take_turns(sides: dict[str, Side], work: list[Any]) -> Found:
    """Return the rates of all calls except the first; ends the sides."""
    found: Found = {name: [] for name in sides}
    for i, step in enumerate(work):
        for side, process in sides.items():
            rate = sum(len(row["completion"]) for g in step for row in g) / process.step()
            if i:
                found[side].append(rate)
    for process in sides.values():
        process.close()
    return found


def against_trl(model: Path, scratch: Path) -> Found:
    """Return the rates of our ways and of TRL, 32 samples per call."""
    work = [draw_step(step, is_fixed=False) for step in range(STEPS)]
    request = {"model": str(model), "work": work, "engine": "transformers"}
    trl = {**request, "what": "sample", "dtype": "float32", "micro": 8, "longest": LONGEST}
    sides = {"trl": Side(TRL, trl, scratch / "trl")}
    for name, options in OPTIONS.items():
        sides[name] = Side(OURS, {**request, "options": options}, scratch / name)
    return take_turns(sides, work)


def against_vllm(model: Path, scratch: Path) -> Found:
    """Return the rates of both engines, 64 samples per call; nothing where there is no vLLM."""
    try:
        find_python()
    except EngineError as error:
        print(f"\nnot compared with vLLM: {error}")
        return {}
    draws = [draw_step(step, is_fixed=False) for step in range(2 * STEPS)]
    work = [draws[i] + draws[i + 1] for i in range(0, len(draws), 2)]
    request = {"model": str(model), "work": work, "options": {}}
    return take_turns(
        {
            engine: Side(OURS, {**request, "engine": engine}, scratch / engine)
            for engine in ("vllm", "transformers")
        },
        work,
    )


def print_rates(title: str, found: Found, reference: str) -> dict[str, float]:
    """Print the medians of some sides; return them over the reference's."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = {name: value / medians[reference] for name, value in medians.items()}
    print_table(
        f"completion tokens per CPU second, Qwen3 4 x 256, {title}, lognormal, float32",
        ["side", "tokens / CPU s", f"over {reference}"],
        [[name, f"{value:,.0f}", f"{ratios[name]:.2f}"] for name, value in medians.items()],
    )
    return ratios


def main() -> None:
    """Measure all sides in turn, print it, write it."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = build_model(scratch / "model")
        trl = against_trl(model, scratch)
        vllm = against_vllm(model, scratch)
    ratios = print_rates("4 prompts x 8", trl, "trl")
    metrics = {
        "sampling_ratio": ratios["all at once"],
        "sampling_ratio_16_rows": ratios["16 rows"],
        "sampling_ratio_own_forward": ratios["own forward pass"],
    }
    if vllm:
        over = print_rates("8 prompts x 8", vllm, "transformers")
        metrics["vllm_over_transformers_64"] = over["vllm"]
    detail = {"tokens_per_cpu_s": trl, "engines_64": vllm, "load": os.getloadavg()}
    write("inference", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        measure_ours(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        main()
