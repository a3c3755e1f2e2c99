"""Engines on a device: the conformance suite, honest margins, tokens a second, examining.

* conformance, vllm: `tests/conformance/engines` with the device as an option; vLLM has its CUDA
  graphs there.
* margins, `gpu_margins_rejected_float32`: number of samples, made on the device and examined on the
  CPU or the other way round, that the tightest limits of any calibration would reject; the detail
  has flips, margins and the errors of proofs, in both number formats.
* generation, `gpu_generation_overhead`: the share of generation time that verifiable sampling and
  proofs take; the reference takes the tokens of the largest logits.
* vllm-speed, `gpu_vllm_overhead`: the share by which Muster's engine on vLLM is slower than vLLM.
* examination, `gpu_examine_over_generate`: time of examining over that of generating.

Models have random weights.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from benchmarks.gpu.setup import Figures, Missing, Setup
from benchmarks.inference.size import PROOF, examination, examined_again

from muster.inference import decode_loop
from muster.inference.calibrated_limits import FLOORS, chunk_limits
from muster.inference.engine import Completion, Request, Room, Sample
from muster.inference.layer_math import math_on
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.inference.vllm.launcher import (
    find_python,
    process_environment,
    require_usable,
)
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.toploc import ChunkResult
from muster.toploc.calibration import ChunkLimits

HERE = Path(__file__)
SUITE = HERE.parents[2] / "tests" / "conformance" / "engines"
LONG = 2_000
"""Tokens of a sample that is examined."""
CALLS = 3
"""Calls whose median counts, after one that warms up."""
WARMTH = 0.2
"""Temperature of margins: logits of random weights are a fifth of what a trained model's are."""


# --------------------------------------------------------------------------- the conformance suite


def measure_conformance(setup: Setup) -> Figures:
    """Put the transformers engines through the suite on the device."""
    return _suite(setup, "gpu_conformance", "not vllm")


def measure_vllm(setup: Setup) -> Figures:
    """Put vLLM's engines through the suite on the device."""
    _require_vllm(setup)
    return _suite(setup, "gpu_vllm", "vllm")


def _suite(setup: Setup, name: str, marks: str) -> Figures:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    # A library's warning about a device is not a failure.
    command += ["-W", "default", "-m", marks, "--device", setup.device]
    command += ["-k", "knows_its_policy and 3-rows"] if setup.is_tiny else []
    done = subprocess.run(command, cwd=HERE.parents[2], stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if not counts:
        raise RuntimeError(f"pytest ended with {done.returncode} and told nothing")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    metrics = {f"{name}_passed": float(counts.get("passed", 0)), f"{name}_failed": float(failed)}
    return metrics, {"failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)}


def _require_vllm(setup: Setup) -> Path:
    """Return the Python of a vLLM that computes on the device; raises Missing."""
    try:
        python = find_python()
        require_usable(python)
    except EngineError as error:
        raise Missing(f"{error}; {error.hint}") from error
    asked = [
        str(python),
        "-c",
        "from vllm.platforms import current_platform as p; print(p.is_cpu())",
    ]
    done = subprocess.run(asked, capture_output=True, text=True)
    is_cpu = done.stdout.splitlines()[-1:] == ["True"]
    if done.returncode or is_cpu != (setup.device == "cpu"):
        raise Missing(f"the vLLM of {python} is not built for {setup.device}")
    return python


# ---------------------------------------------------------------------------------------- margins


def measure_margins(setup: Setup) -> Figures:
    """Let each of device and CPU examine what the other made."""
    model, found = setup.model("mid"), {}
    metrics: dict[str, float] = {}
    threads = setup.pick(1, os.cpu_count() or 1)
    for dtype in FLOORS:
        here, there = (_engine(model, device, dtype, threads) for device in ("cpu", setup.device))
        rejected = 0
        for name, maker, judge in (("device to CPU", there, here), ("CPU to device", here, there)):
            found[f"{dtype}, {name}"] = each = _judged(maker, judge, dtype, setup)
            rejected += each["rejected"]
        metrics[f"gpu_margins_rejected_{dtype}"] = float(rejected)
        metrics[f"gpu_margin_largest_{dtype}"] = max(
            each["largest"] for name, each in found.items() if name.startswith(dtype)
        )
    return metrics, found


def _engine(model: Path, device: str, dtype: Any, threads: int = 1) -> TransformersEngine:
    engine = TransformersEngine(dtype, device=device, threads=threads)
    engine.load_policy(model, PolicyVersion(1))
    return engine


def _judged(
    maker: TransformersEngine, judge: TransformersEngine, dtype: str, setup: Setup
) -> dict[str, Any]:
    """Return the figures of one engine's samples in another's examination."""
    asked = [
        Request((10 + i % 4, 11, 12), i, WARMTH, setup.pick(12, 128))
        for i in range(setup.pick(4, 32))
    ]
    made = maker.generate(asked, proof=PROOF)
    claimed = [
        Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs)
        for r, c in zip(asked, made, strict=True)
    ]
    seen = judge.examine(claimed, proof=PROOF, temperature=WARMTH)
    margins = np.concatenate([each.replayed.margins_T for each in seen])
    chunks = [chunk for each in seen for chunk in each.chunks]
    floors = FLOORS[dtype]
    limits = chunk_limits([ChunkResult(0, 0.0, 0.0, 0, PROOF.topk)], PROOF, floors)
    return {
        "tokens": len(margins),
        "flips": float((margins > 0).mean()),
        "largest": float(margins.max()),
        "exponents": max(chunk.exponent_mismatches for chunk in chunks),
        "mantissa_mean": max(chunk.mantissa_error_mean for chunk in chunks),
        "rejected": sum(
            bool((each.replayed.margins_T > floors.margin).any())
            or not all(_passes(chunk, limits) for chunk in each.chunks)
            for each in seen
        ),
    }


def _passes(chunk: ChunkResult, limits: ChunkLimits) -> bool:
    return (
        chunk.exponent_mismatches <= limits.max_exponent_mismatches
        and chunk.mantissa_error_mean <= limits.max_mantissa_error_mean
        and chunk.mantissa_error_median <= limits.max_mantissa_error_median
    )


# ------------------------------------------------------------------------------------------ speed


def greedy(logits: torch.Tensor, *_: object) -> torch.Tensor:
    """Return the ids of the largest logits: the choice without noise."""
    return logits.argmax(dim=1)


class NoProofs:
    """Replaces the builder of proofs, and builds none."""

    def close(self) -> None:
        """End nothing."""

    def extend(self, *_: object) -> None:
        """Drop rows."""

    def end(self, *_: object) -> None:
        """End nothing."""

    def take(self, _: int) -> list[bytes]:
        """Return no proofs."""
        return []


def requests(setup: Setup) -> list[Request]:
    """Return the requests for measuring the speed of generation."""
    prompt = tuple(range(10, 10 + setup.pick(4, 64)))
    tokens = setup.pick(8, 256)
    return [Request(prompt, seed, 1.0, tokens) for seed in range(setup.pick(2, 64))]


def rate(setup: Setup, generate: Callable[[], Sequence[Completion]]) -> float:
    """Return the completion tokens a second of a call."""
    began = setup.now()
    made = generate()
    return sum(len(completion.tokens) for completion in made) / (setup.now() - began)


def measure_generation(setup: Setup) -> Figures:
    """Measure the transformers engine with and without noise and proofs, in turn."""
    engine, asked = _engine(setup.model("q06"), setup.device, "bfloat16"), requests(setup)

    def plain() -> list[Completion]:
        with (
            mock.patch.object(decode_loop, "choices", greedy),
            mock.patch.object(decode_loop, "builder_on", return_value=NoProofs()),
        ):
            return engine.generate(asked, proof=PROOF)

    rates: dict[str, list[float]] = {"muster": [], "plain": []}
    for turn in range(setup.pick(1, CALLS) + 1):
        found = {
            "muster": rate(setup, lambda: engine.generate(asked, proof=PROOF)),
            "plain": rate(setup, plain),
        }
        for name, each in found.items():
            if turn:
                rates[name].append(each)
    metrics = {"gpu_tokens_per_s": statistics.median(rates["muster"])}
    metrics["gpu_generation_overhead"] = 1 - metrics["gpu_tokens_per_s"] / statistics.median(
        rates["plain"]
    )
    return metrics, {"rates": rates, "memory_gb": setup.memory_gb(), "samples": len(asked)}


def measure_vllm_speed(setup: Setup) -> Figures:
    """Measure Muster's engine on vLLM, then vLLM by itself: one GPU holds one of them at a time."""
    python, model, asked = _require_vllm(setup), setup.model("q06"), requests(setup)
    calls = setup.pick(1, CALLS) + 1
    longest = len(asked[0].prompt_tokens) + asked[0].max_new_tokens
    with closing(
        VllmEngine("bfloat16", device=setup.device, room=Room(context=longest), python=python)
    ) as engine:
        engine.load_policy(model, PolicyVersion(1))
        ours = [rate(setup, lambda: engine.generate(asked, proof=PROOF)) for _ in range(calls)][1:]
    numbers = (len(asked), len(asked[0].prompt_tokens), asked[0].max_new_tokens, calls)
    done = subprocess.run(
        [str(python), "-P", str(HERE.parent / "plain_vllm.py"), str(model), setup.device]
        + [str(number) for number in numbers],
        env=process_environment(threads=1, device=setup.device),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    plain = [float(line) for line in done.stdout.splitlines()[-calls:]][1:]
    overhead = 1 - statistics.median(ours) / statistics.median(plain)
    metrics = {"gpu_vllm_tokens_per_s": statistics.median(ours), "gpu_vllm_overhead": overhead}
    return metrics, {"muster": ours, "plain": plain, "samples": len(asked)}


def measure_examination(setup: Setup) -> Figures:
    """Measure examining beside generating. A validator examines one submission after the other, so
    the first examination, which also allocates memory, is in the detail.
    """
    engine = _engine(setup.model("q06"), setup.device, "bfloat16")
    examination(engine, 2, 8, setup.now)
    done = examination(engine, setup.pick(2, 16), setup.pick(24, LONG), setup.now)
    tokens = sum(len(sample.completion_tokens) for sample in done.samples)
    examine_s = statistics.median(examined_again(engine, done, n, setup.now) for n in range(1, 6))
    metrics = {
        "gpu_examine_over_generate": examine_s / done.generate_s,
        "gpu_examine_tokens_per_s": tokens / examine_s,
        "gpu_examine_wrong_share": done.wrong / tokens,
    }
    detail = {"tokens": tokens, "generate_s": done.generate_s, "examine_s": examine_s}
    return metrics, {
        **detail,
        "first_examine_s": done.examine_s,
        "fused_layers": type(math_on(engine.model.device, torch.bfloat16)).__name__,
        "largest_margin": done.largest_margin,
        "memory_gb": setup.memory_gb(),
    }
