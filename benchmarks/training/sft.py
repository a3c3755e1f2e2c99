"""Supervised fine-tuning against TRL's SFTTrainer, on the same model and the same rows.

    make bench-sft

 1. Tokens (prompt and completion of every row) per CPU second of whole optimiser steps, one thread,
    float32: `SftLearner.step` against `SFTTrainer`. Both count passes, loss, clip and AdamW; ours
    also counts packing. Each side is a process of its own; they take their steps in turn: for each
    kind of data, one step warms up and three are counted. Ratios are of medians. TRL pads rows to
    the longest of a micro-batch of 8, its defaults; a second TRL process gets the rows of a step
    sorted by length. TRL's rows without padding need flash attention, which a CPU does not have.
 2. Log-probabilities of the first step's tokens before any step, and the losses of all steps.

Data: 8 rows a problem in the same step, as `training.order` "problems" gives them from the rows of
a data run; and one row a problem, as after `--per-problem 1`.

Writes results/sft.json.
"""

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
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.learn.sft_learner import SftLearner
from muster.trainer.publish.policies import BASE, PolicyShelf

OURS = [sys.executable, "-m", "benchmarks.training.sft"]
ROWS = 32
"""Rows of an optimiser step."""
STEPS = 4
"""Steps of each kind of data; the first warms up."""
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
KINDS = {
    "8 a problem, short": (8, 28),
    "8 a problem, long": (8, 160),
    "1 a problem, short": (1, 28),
    "1 a problem, long": (1, 160),
}
"""Rows of a problem in a step, and the median tokens of a completion."""
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
    learner = SftLearner(shelf.path(BASE), recipe, published=shelf.weights)
    print(json.dumps({"logprobs": logprobs(learner, request["work"][0])}), flush=True)
    last = Step(len(request["work"]))
    for number, rows in enumerate(request["work"], 1):
        sys.stdin.readline()
        started = time.process_time()
        figures = learner.step(Step(number), last, samples_of(rows))
        step_s = time.process_time() - started
        print(json.dumps({"loss": figures.loss}), flush=True)
        print(f"step_s {step_s}", flush=True)


def samples_of(rows: list[Row]) -> list[TrainingSample]:
    """Return the learner's samples of rows."""
    return [TrainingSample(tuple(row["prompt"]), tuple(row["completion"])) for row in rows]


@torch.no_grad()
def logprobs(learner: SftLearner, rows: list[Row]) -> list[list[float]]:
    """Return the log-probabilities of the rows' completions, computed as they are trained on."""
    passes = learner._passes
    found: list[list[float]] = [[] for _ in rows]
    for batch in passes.pack(samples_of(rows)):
        parts = torch.split(passes.current(batch), batch.row_N.bincount().tolist())
        for place, part in zip(batch.order, parts, strict=True):
            found[place] = part.tolist()
    return found


def measure(scratch: Path) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
    """Return tokens per CPU second by data and side, a value per step; and how far the numbers
    differ.
    """
    kinds = [kind for kind in KINDS for _ in range(STEPS)]
    work = [draw_rows(step, *KINDS[kind]) for step, kind in enumerate(kinds)]
    by_length = [sorted(rows, key=lambda row: -len(row["completion"])) for rows in work]
    request = {
        "what": "sft",
        "model": str(build_model(scratch / "model")),
        "folder": str(scratch / "shelf"),
        "work": work,
        "micro": MICRO,
        "training": TRAINING,
    }
    sides = {
        "ours": Side(OURS, request, scratch / "ours"),
        "trl": Side(TRL, request, scratch / "trl"),
        "trl, by length": Side(TRL, {**request, "work": by_length}, scratch / "by-length"),
    }
    rates: dict[str, dict[str, list[float]]] = {kind: {s: [] for s in sides} for kind in KINDS}
    for number, (kind, rows) in enumerate(zip(kinds, work, strict=True)):
        tokens = sum(len(row["prompt"]) + len(row["completion"]) for row in rows)
        for side, process in sides.items():
            rate = tokens / process.step()
            if number % STEPS:
                rates[kind][side].append(rate)
    for process in sides.values():
        process.close()
    (ours, *our_losses), (trl, *their_losses) = sides["ours"].said, sides["trl"].said
    pairs = [(a["loss"], b["loss"]) for a, b in zip(our_losses, their_losses, strict=True)]
    return rates, {
        "logprob_difference": _furthest(ours["logprobs"], trl["logprobs"]),
        "loss_difference": max(abs(one - two) for one, two in pairs),
        "losses": pairs,
    }


def _furthest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Return the largest difference of two log-probabilities, over our one's size if above 1."""
    return max(
        abs(one - two) / max(1.0, abs(one))
        for row, other in zip(ours, theirs, strict=True)
        for one, two in zip(row, other, strict=True)
    )


def ratio(rates: dict[str, list[float]], over: str) -> float:
    """Return the ratio of our median to another's."""
    return statistics.median(rates["ours"]) / statistics.median(rates[over])


def show(rates: dict[str, dict[str, list[float]]], numbers: dict[str, Any]) -> None:
    """Print the table, and how far the numbers differ."""
    rows = [
        [
            kind,
            f"{statistics.median(each['ours']):,.0f}",
            *(
                cell
                for side in ("trl", "trl, by length")
                for cell in (f"{statistics.median(each[side]):,.0f}", f"{ratio(each, side):.2f}")
            ),
        ]
        for kind, each in rates.items()
    ]
    print_table(
        "tokens per CPU second, Qwen3 4 x 256, 32 rows a step, float32, one thread",
        ["data", "ours", "TRL 1.16.0", "ratio", "sorted by length", "ratio"],
        rows,
    )
    print(
        f"largest difference: log-probabilities {numbers['logprob_difference']:.1e} of their size, "
        f"losses {numbers['loss_difference']:.1e} nats"
    )


def main() -> None:
    """Measure everything, print it, write it."""
    with tempfile.TemporaryDirectory() as folder:
        rates, numbers = measure(Path(folder))
    show(rates, numbers)
    metrics = {f"tokens_ratio_{_id(kind)}": ratio(each, "trl") for kind, each in rates.items()}
    metrics |= {name: numbers[name] for name in ("logprob_difference", "loss_difference")}
    detail = {"tokens_per_cpu_s": rates, **numbers, "load": os.getloadavg()}
    write("sft", metrics, detail, measured_on=machine())


def _id(kind: str) -> str:
    return kind.replace(", ", "_").replace(" ", "_")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_ours(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        main()
