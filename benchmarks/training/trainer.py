"""The trainer against TRL's GRPOTrainer, and its log-probabilities against full logits.

    make bench-trainer

 1. Trained tokens (prompt and completion of every sample) per CPU second of whole optimiser steps,
    one thread: `Learner.step` against `GRPOTrainer`, on the same model and the same completions.
    Ours counts filter, advantages, packing, both passes, clip and AdamW; TRL's side leaves
    generation, rewards and advantages out. Each side is a process of its own; they take their steps
    in turn, one to warm up, five counted. Ratios are of medians.
 2. CPU seconds and extra memory of the log-probabilities of 2,048 tokens at width 1024 and a
    vocabulary of 151,936, forward and backward, bfloat16, see `logprob_memory.py`.

Writes results/trainer.json.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import machine, print_table, write
from benchmarks.training.trl_work import (
    GROUP,
    LONGEST,
    PROMPTS,
    TRL,
    Side,
    build_model,
    draw_step,
    measured_apart,
)

from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.learner import Learner

OURS = [sys.executable, "-m", "benchmarks.training.trainer"]
LOGPROB = [sys.executable, "-m", "benchmarks.training.logprob_memory"]
ROUNDS = 3
"""Rounds in which the log-probabilities are measured."""
STEPS = 6
"""Steps of each side, in turn; the first warms up."""
SETTINGS = {
    "lognormal, float32": {"dtype": "float32", "is_fixed": False},
    "lognormal, bfloat16": {"dtype": "bfloat16", "is_fixed": False},
    "fixed 96, float32": {"dtype": "float32", "is_fixed": True},
}
MICRO = 8
"""TRL's micro-batch; 32 at once is slower, because it pads all to the longest."""
FORMS = ("full", "recompute", "one_pass")


def recipe() -> Recipe:
    """Return TRL's defaults as a recipe: DAPO's loss, no KL term, one optimiser step."""
    return Recipe(
        name="bench",
        sampling=SamplingRecipe(
            problems_per_submission=PROMPTS,
            samples_per_problem=GROUP,
            temperature=1.0,
            max_new_tokens=LONGEST,
        ),
        training=TrainingRecipe.model_validate(
            {
                "loss": "dapo",
                "submissions_per_step": 1,
                "optimizer_steps": 1,
                "learning_rate": 1e-6,
                "warmup_steps": 0,
                "max_grad_norm": 1.0,
                "kl_coefficient": 0.0,
                "entropy_coefficient": 0.0,
            }
        ),
    )


def rollouts(step: list[list[dict[str, list[int]]]], version: int) -> list[list[Rollout]]:
    """Return a step's groups as the training stream gives them."""
    return [
        [
            Rollout(
                problem_id=f"p{g}",
                group=g,
                sample=s,
                sampling_seed=s,
                target_length=-1,
                policy_version=version,
                prompt_tokens=tuple(row["prompt"]),
                completion_tokens=tuple(row["completion"]),
                proofs=b"proof",
                task_reward=float(s % 2),
            )
            for s, row in enumerate(group)
        ]
        for g, group in enumerate(step)
    ]


STALE = 1_000_000
"""Versions from this number on stand for other policies than the one in training."""


def measure_ours(request: dict[str, Any]) -> None:
    """Take a step for every line of input and print its CPU seconds: with samples of the current
    policy, or of another policy, whose log-probabilities take a pass of their own.
    """
    torch.set_num_threads(1)
    learner: Learner

    def published(version: PolicyVersion) -> Any:
        weights = learner.weights()
        if version < STALE:
            return weights
        return {name: weight + 1e-4 for name, weight in weights.items()}

    learner = Learner(
        Path(request["model"]), recipe(), published=published, compute_dtype=request["dtype"]
    )
    for i, step in enumerate(request["work"]):
        sys.stdin.readline()
        groups = rollouts(step, version=i + 1 + STALE * request["is_stale"])
        started = time.process_time()
        figures = learner.step(Step(i + 1), groups)
        print(f"step_s {time.process_time() - started}", flush=True)
        assert figures.samples == PROMPTS * GROUP
        assert not figures.skipped


def tokens(step: list[list[dict[str, list[int]]]]) -> int:
    """Return the tokens of all samples of a step, prompts included."""
    return sum(len(row["prompt"]) + len(row["completion"]) for group in step for row in group)


def measure_training(scratch: Path) -> dict[str, dict[str, list[float]]]:
    """Return tokens per CPU second by setting and side, a value per step."""
    model = build_model(scratch / "model")
    found: dict[str, dict[str, list[float]]] = {}
    for name, setting in SETTINGS.items():
        work = [draw_step(step, is_fixed=bool(setting["is_fixed"])) for step in range(STEPS)]
        request = {
            "what": "train",
            "model": str(model),
            "dtype": setting["dtype"],
            "work": work,
            "micro": MICRO,
            "longest": LONGEST,
        }
        sides = {
            "ours": Side(OURS, {**request, "is_stale": False}, scratch / "ours"),
            "trl": Side(TRL, request, scratch / "trl"),
            "ours, behaviour pass": Side(OURS, {**request, "is_stale": True}, scratch / "stale"),
        }
        found[name] = {side: [] for side in sides}
        for i, step in enumerate(work):
            for side, process in sides.items():
                rate = tokens(step) / process.step()
                if i:
                    found[name][side].append(rate)
        for process in sides.values():
            process.close()
    return found


def measure_logprobs(scratch: Path) -> dict[str, dict[str, list[float]]]:
    """Return CPU seconds and extra megabytes by form, a value per round."""
    found: dict[str, dict[str, list[float]]] = {f: {"cpu_s": [], "extra_mb": []} for f in FORMS}
    for _ in range(ROUNDS):
        for form in FORMS:
            answer = measured_apart(LOGPROB, {"form": form}, scratch)
            for key, values in found[form].items():
                values.append(answer[key])
    return found


def ratio(rows: dict[str, list[float]], of: str, over: str) -> float:
    """Return the ratio of two medians."""
    return statistics.median(rows[of]) / statistics.median(rows[over])


def show(training: dict[str, Any], logprobs: dict[str, Any]) -> None:
    """Print both tables."""

    def median(values: list[float], digits: int = 0) -> str:
        return f"{statistics.median(values):,.{digits}f}"

    print_table(
        "trained tokens per CPU second, Qwen3 4 x 256, 4 prompts x 8, one thread",
        ["setting", "ours", "TRL 1.16.0", "ratio", "ours with a behaviour pass", "ratio"],
        [
            [
                name,
                median(rows["ours"]),
                median(rows["trl"]),
                f"{ratio(rows, 'ours', 'trl'):.2f}",
                median(rows["ours, behaviour pass"]),
                f"{ratio(rows, 'ours, behaviour pass', 'trl'):.2f}",
            ]
            for name, rows in training.items()
        ],
    )
    full = logprobs["full"]
    print_table(
        "log-probabilities of 2,048 tokens, width 1024, vocabulary 151,936, bfloat16",
        ["form", "CPU s", "of full logits", "extra MB", "of full logits"],
        [
            [
                form,
                median(rows["cpu_s"], 1),
                f"{ratio({**rows, 'full': full['cpu_s']}, 'cpu_s', 'full'):.2f}",
                median(rows["extra_mb"]),
                f"{ratio({**rows, 'full': full['extra_mb']}, 'extra_mb', 'full'):.3f}",
            ]
            for form, rows in logprobs.items()
        ],
    )


def main() -> None:
    """Measure everything, print it, write it."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        training = measure_training(scratch)
        logprobs = measure_logprobs(scratch)
    show(training, logprobs)
    best = {
        side: max(
            statistics.median(training[f"lognormal, {dtype}"][side])
            for dtype in ("float32", "bfloat16")
        )
        for side in ("ours", "trl")
    }
    full = logprobs["full"]
    worst = max(("recompute", "one_pass"), key=lambda f: statistics.median(logprobs[f]["extra_mb"]))
    metrics = {
        "tokens_ratio_fp32": ratio(training["lognormal, float32"], "ours", "trl"),
        "tokens_ratio_best": best["ours"] / best["trl"],
        "tokens_ratio_fixed": ratio(training["fixed 96, float32"], "ours", "trl"),
        "logprob_memory_ratio": ratio(
            {"ours": logprobs[worst]["extra_mb"], "full": full["extra_mb"]}, "ours", "full"
        ),
        "logprob_time_ratio": ratio(
            {"ours": logprobs["one_pass"]["cpu_s"], "full": full["cpu_s"]}, "ours", "full"
        ),
    }
    detail = {"tokens_per_cpu_s": training, "logprob": logprobs, "load": os.getloadavg()}
    write("trainer", metrics, detail, measured_on=machine())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_ours(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        main()
