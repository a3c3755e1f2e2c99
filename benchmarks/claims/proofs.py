"""The size of proofs, and their validity when a model is spread over several devices.

TOPLOC's paper gives 258 bytes for 32 tokens, a thousandth of the hidden states, and robustness
across tensor-parallel layouts. Sizes are those of proofs that are built here. There are no two GPUs
here, so a layout is emulated by its arithmetic: each device multiplies its part of every layer,
partial sums are rounded to the number format of the weights and added in order, as an all-reduce
does. A worker with each layout is judged by a validator with each layout, under limits calibrated
on work of one device.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.claims.study import Study
from benchmarks.proofs import base_models
from benchmarks.report import print_table
from torch import Tensor

from muster.inference import calibrated_limits
from muster.inference.attacks import sample_row
from muster.inference.engine import Request
from muster.inference.measuring import Delivery, Errors
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc import Calibration, build_proofs
from muster.toploc.calibration import CalibratedModel

WIDTHS = (128, 1024, 4096, 5120)
"""Widths of hidden states; the last two are those of models of 8 and 32 billion parameters."""
LAYOUTS = (1, 2, 4)
"""Devices that a model is spread over."""
SAMPLES = 96
MODEL = base_models.shortened("4x128", 40)
ENGINE = "transformers:bfloat16"
RECIPE = Recipe(
    name="claims",
    sampling=SamplingRecipe(
        problems_per_submission=8, samples_per_problem=16, temperature=1.0, max_new_tokens=64
    ),
    training=TrainingRecipe(submissions_per_step=4, learning_rate=1e-6),
)
_SUMMED = ("o_proj", "down_proj")
"""Layers whose inputs are divided, so that their outputs are sums over devices."""


def bytes_per_token(width: int, tokens: int) -> float:
    """Return the bytes of proofs per token, by building them."""
    hidden = np.random.default_rng(width).standard_normal((tokens, width)).astype(np.float32)
    return sum(map(len, build_proofs(torch.from_numpy(hidden).bfloat16()))) / tokens


@contextmanager
def spread_over(engine: TransformersEngine, devices: int) -> Iterator[None]:
    """Compute as if every layer were spread over `devices` devices; 1 changes nothing."""
    if devices == 1:
        yield
        return
    lean, engine.lean = engine.lean, False
    layers = [
        (name, module)
        for name, module in engine.model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    for name, module in layers:
        is_summed = name.endswith(_SUMMED)
        setattr(module, "forward", _spread(module, devices, is_summed=is_summed))  # noqa: B010  # a method
    try:
        yield
    finally:
        engine.lean = lean
        for _, module in layers:
            del module.forward


def _spread(
    module: torch.nn.Linear, devices: int, *, is_summed: bool
) -> Callable[[Tensor], Tensor]:
    parts = module.weight.chunk(devices, dim=1 if is_summed else 0)

    def forward(given: Tensor) -> Tensor:
        if not is_summed:
            return torch.cat([torch.nn.functional.linear(given, part) for part in parts], dim=-1)
        inputs = given.chunk(devices, dim=-1)
        first, *others = map(torch.nn.functional.linear, inputs, parts)
        for each in others:
            first = first + each
        return first

    return forward


def judge_layouts(folder: Path) -> dict[str, dict[str, float]]:
    """Return what validators of every layout find in workers of every other."""
    rng = random.Random(1)
    prompts = [base_models.prompt(rng) for _ in range(32)]
    engine = TransformersEngine("bfloat16")
    engine.load_policy(folder, PolicyVersion(0))
    requests = [
        Request(engine.encode(prompts[i % len(prompts)]), i, 1.0, 64) for i in range(SAMPLES)
    ]
    works = {devices: _generate(engine, requests, devices) for devices in LAYOUTS}
    calibration = _limits(engine, works[1])
    return {
        f"{worker} to {validator}": _found(engine, works[worker], validator, calibration)
        for worker in LAYOUTS
        for validator in LAYOUTS
        if worker != validator
    }


def _limits(engine: TransformersEngine, work: Delivery) -> Calibration:
    """Return limits of work on one device, recomputed there by the fast path and by the model's."""
    errors = _errors(engine, work)
    engine.lean = False
    errors += _errors(engine, work)
    engine.lean = True
    floors = calibrated_limits.FLOORS["bfloat16"]
    return Calibration(
        model=CalibratedModel(
            name="claims", architecture="Qwen3", hidden_size=MODEL.hidden,
            vocab_size=engine.vocab_size, engine=ENGINE,
        ),
        chunk=calibrated_limits.chunk_limits(errors.all_chunks(), RECIPE.proof, floors),
        sampler=calibrated_limits.sampler_limits(np.concatenate(errors.margins), 64, floors),
        fraud_strikes=2,
    )  # fmt: skip


def _errors(engine: TransformersEngine, work: Delivery) -> Errors:
    return Errors.of(engine.examine(work.samples(), proof=RECIPE.proof, temperature=1.0))


def _generate(engine: TransformersEngine, requests: Sequence[Request], devices: int) -> Delivery:
    with spread_over(engine, devices):
        return Delivery(requests, engine.generate(requests, proof=RECIPE.proof))


def _found(
    engine: TransformersEngine, work: Delivery, devices: int, calibration: Calibration
) -> dict[str, float]:
    with spread_over(engine, devices):
        errors = _errors(engine, work)
    row = sample_row(calibration, "layout", "honest", errors)
    return {
        "samples": row.trials,
        "refused": row.trials - row.accepted,
        "strain": row.strain,
        "mantissa_error_mean": row.mantissa_error_mean,
        "margin": row.margin,
    }


def measure() -> Study:
    """Measure sizes and layouts."""
    sizes = {width: bytes_per_token(width, 512) for width in WIDTHS}
    with tempfile.TemporaryDirectory() as name:
        base_models.build(MODEL, Path(name))
        layouts = judge_layouts(Path(name))
    _print(sizes, layouts)
    refused = sum(found["refused"] for found in layouts.values())
    metrics = {
        "proof_bytes_per_token": sizes[5120],
        "proof_bytes_per_token_of_5": bytes_per_token(5120, 5),
        "hidden_over_proof_4096": 2 * 4096 / sizes[4096],
        "hidden_over_proof_5120": 2 * 5120 / sizes[5120],
        "layout_samples": sum(found["samples"] for found in layouts.values()),
        "layout_refused": refused,
        "layout_strain_max": max(found["strain"] for found in layouts.values()),
    }
    detail: dict[str, Any] = {"layouts": layouts, "bytes": {str(k): v for k, v in sizes.items()}}
    return Study(metrics, detail)


def _print(sizes: dict[int, float], layouts: dict[str, dict[str, float]]) -> None:
    rows = [[str(w), f"{s:.2f}", f"{2 * w / s:.0f}"] for w, s in sizes.items()]
    print_table("Proofs of 512 tokens", ["width", "bytes a token", "hidden states / proof"], rows)
    header = ["devices of worker, validator", *next(iter(layouts.values()))]
    rows = [
        [name, *(f"{value:.4g}" for value in found.values())] for name, found in layouts.items()
    ]
    print_table("Layouts, emulated", header, rows)
