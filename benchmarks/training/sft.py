"""Supervised fine-tuning against TRL's SFTTrainer, on the same model and the same rows.

    make bench-sft

 1. Tokens (prompt and completion of every row) per CPU second of whole optimiser steps, one thread,
    float32: `SftLearner.step` against `SFTTrainer`. Both count passes, loss, clip and AdamW; ours
    packing as well. Each side is a process of its own; they take their steps in turn, one to warm
    up, five counted. Ratios are of medians. TRL pads rows to the longest of a micro-batch of 8,
    its default; two other ways of it are measured beside: rows sorted by length in a step, and
    rows side by side without padding (`padding_free`), which its CPU attention masks.
 2. Log-probabilities of the first step's tokens before any step, and the losses of all steps.

Data sets: one row a problem, as after `--per-problem 1`, and 8 rows of each, as a data run makes.

Writes results/sft.json.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import machine, print_table, write
from benchmarks.training.trl_work import (
    EOS,
    PROMPT_TOKENS,
    TRL,
    VOCABULARY,
    Side,
    build_model,
    draw_length,
)

from muster.protocol.ids import Step
from muster.protocol.sft import SftRecipe
from muster.trainer.learn.packing import Sample
from muster.trainer.learn.sft_learner import SftLearner
from muster.trainer.publish.policies import BASE, PolicyShelf

OURS = [sys.executable, "-m", "benchmarks.training.sft"]
ROWS = 32
"""Rows of an optimiser step."""
STEPS = 6
"""Of each side, in turn; the first warms up."""
MICRO = 8
"""TRL's micro-batch, its default."""
TRAINING = {
    "batch_tokens": 1 << 20,
    "learning_rate": 1e-4,
    "schedule": "constant",
    "warmup_steps": 0,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
DATA_SETS = {"one row a problem": 1, "8 rows a problem": 8}
"""Rows of a problem that come in the same step."""
MEDIANS = {"short": 28, "long": 160}
"""Median tokens of a completion."""
LONGEST = 640

Row = dict[str, list[int]]


def draw_rows(seed: int, per_problem: int, median: int) -> list[Row]:
    """Return a step's rows in random order: prompts of 32 tokens, completions that end in EOS."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(count)]

    rows = []
    for _ in range(ROWS // per_problem):
        prompt = words(PROMPT_TOKENS)
        for _ in range(per_problem):
            length = draw_length(rng, median, LONGEST)
            rows.append({"prompt": prompt, "completion": [*words(length - 1), EOS]})
    rng.shuffle(rows)
    return rows


def measure_ours(request: dict[str, Any]) -> None:
    """Take a step for every line of input; prints what TRL's side prints."""
    torch.set_num_threads(1)
    shelf = PolicyShelf(Path(request["folder"]))
    shelf.adopt(Path(request["model"]))
    recipe = SftRecipe.model_validate(
        {"name": "bench", "rows": {"max_tokens": 1024}, "training": request["training"]}
    )
    learner = SftLearner(
        shelf.path(BASE), recipe, published=shelf.weights, compute_dtype=request["dtype"]
    )
    print(json.dumps({"logprobs": logprobs(learner, request["work"][0])}), flush=True)
    last = Step(len(request["work"]))
    for number, rows in enumerate(request["work"], 1):
        sys.stdin.readline()
        started = time.process_time()
        figures = learner.step(Step(number), last, samples_of(rows))
        step_s = time.process_time() - started
        print(json.dumps({"loss": figures.loss}), flush=True)
        print(f"step_s {step_s}", flush=True)


def samples_of(rows: list[Row]) -> list[Sample]:
    """Return rows as the learner takes them."""
    return [Sample(tuple(row["prompt"]), tuple(row["completion"])) for row in rows]


@torch.no_grad()
def logprobs(learner: SftLearner, rows: list[Row]) -> list[list[float]]:
    """Return the log-probabilities of the rows' completions, computed as they are trained on."""
    passes, found = learner._passes, [[] for _ in rows]
    for batch in passes.pack(samples_of(rows)):
        parts = torch.split(passes.current(batch), batch.row_N.bincount().tolist())
        for place, part in zip(batch.order, parts, strict=True):
            found[place] = part.tolist()
    return found


def measure(scratch: Path, model: Path, per_problem: int, median: int) -> dict[str, Any]:
    """Return tokens per CPU second by side, a value per step, and how far numbers differ."""
    work = [draw_rows(step, per_problem, median) for step in range(STEPS)]
    by_length = [sorted(rows, key=lambda row: -len(row["completion"])) for rows in work]
    request = {
        "what": "sft",
        "model": str(model),
        "dtype": "float32",
        "work": work,
        "micro": MICRO,
        "packing": False,
        "training": TRAINING,
    }
    asked = {
        "ours": (OURS, {**request, "folder": str(scratch / f"shelf {per_problem} {median}")}),
        "trl": (TRL, request),
        "trl, by length": (TRL, {**request, "work": by_length}),
        "trl, padding-free": (TRL, {**request, "packing": True}),
    }
    sides = {
        name: Side(command, what, scratch / name.replace(", ", "-"))
        for name, (command, what) in asked.items()
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number, rows in enumerate(work):
        tokens = sum(len(row["prompt"]) + len(row["completion"]) for row in rows)
        for side, process in sides.items():
            rate = tokens / process.step()
            if number:
                rates[side].append(rate)
    for process in sides.values():
        process.close()
    ours, trl = sides["ours"].said, sides["trl"].said
    return {
        "tokens_per_cpu_s": rates,
        "logprob_difference": _furthest(ours[0]["logprobs"], trl[0]["logprobs"]),
        "loss_difference": max(
            abs(one["loss"] - two["loss"]) for one, two in zip(ours[1:], trl[1:], strict=True)
        ),
        "losses": [each["loss"] for each in ours[1:]],
    }


def _furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Return the largest difference of two log-probabilities, of the larger one's size."""
    return max(
        abs(one - two) / max(1.0, abs(one))
        for row, other in zip(ours, theirs, strict=True)
        for one, two in zip(row, other, strict=True)
    )


def ratio(rates: dict[str, list[float]], over: str) -> float:
    """Return the ratio of our median to another's."""
    return statistics.median(rates["ours"]) / statistics.median(rates[over])


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for name, each in found.items():
        rates = each["tokens_per_cpu_s"]
        rows.append(
            [
                name,
                f"{statistics.median(rates['ours']):,.0f}",
                *(
                    f"{statistics.median(rates[side]):,.0f} ({ratio(rates, side):.2f}x)"
                    for side in rates
                    if side != "ours"
                ),
                f"{each['logprob_difference']:.1e}",
                f"{each['loss_difference']:.1e}",
            ]
        )
    print_table(
        "tokens per CPU second, Qwen3 4 x 256, 32 rows a step, float32, one thread",
        ["data", "ours", "TRL 1.16.0", "by length", "padding-free", "logp", "loss"],
        rows,
    )


def main() -> None:
    """Measure everything, print it, write it."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = build_model(scratch / "model")
        found = {
            f"{name}, {length}": measure(scratch, model, per_problem, median)
            for name, per_problem in DATA_SETS.items()
            for length, median in MEDIANS.items()
        }
    show(found)
    metrics = {
        f"tokens_ratio_{'grouped' if '8' in name else 'single'}_{name.split()[-1]}": ratio(
            each["tokens_per_cpu_s"], "trl"
        )
        for name, each in found.items()
    }
    metrics["logprob_difference"] = max(each["logprob_difference"] for each in found.values())
    metrics["loss_difference"] = max(each["loss_difference"] for each in found.values())
    write("sft", metrics, {**found, "load": os.getloadavg()}, measured_on=machine())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_ours(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        main()
