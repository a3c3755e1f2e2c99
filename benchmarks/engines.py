"""The engine on vLLM against the engine on transformers.

    make vllm bench-inference

Completion tokens per CPU second, one thread, proofs and verifiable sampling included: the same
requests to both engines in turn, one call to warm up, five counted; ratios are of medians. CPU
seconds are those of the engine's processes, vLLM's own included, because the machine may be busy.
Same model (Qwen3, 4 x 256, 3.28 M parameters), one prompt of 32 tokens per sample, 64 new tokens.

Writes results/engines.json; measures nothing where vLLM is not installed.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from report import machine, print_table, write
from trl_work import build_model

from muster.inference.engine import InferenceEngine, Request
from muster.inference.plan import NumberFormat
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.inference.vllm.environment import find_python
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

CALLS = 6
BATCHES = (1, 16, 64)
FORMATS: tuple[NumberFormat, ...] = ("float32", "bfloat16")


def draw(count: int, call: int) -> list[Request]:
    """Return requests whose prompts no earlier call had."""
    rng = random.Random(f"{count} {call}")
    prompts = [tuple(rng.randrange(2, 256) for _ in range(32)) for _ in range(count)]
    return [Request(prompt, rng.getrandbits(64), 1.0, 64) for prompt in prompts]


def cpu_s(engine: InferenceEngine) -> float:
    """Return the CPU seconds that an engine's processes have used."""
    own = time.process_time()
    if isinstance(engine, VllmEngine) and engine.pid is not None:
        used = psutil.Process(engine.pid).cpu_times()
        return own + used.user + used.system
    return own


def measure(engine: InferenceEngine, requests: list[Request]) -> tuple[float, float]:
    """Return completion tokens per CPU second and per second."""
    started, before = time.perf_counter(), cpu_s(engine)
    made = engine.generate(requests, proof=ProofRecipe())
    tokens = sum(len(completion.tokens) for completion in made)
    return tokens / (cpu_s(engine) - before), tokens / (time.perf_counter() - started)


def main() -> None:
    """Measure both engines in turn, print it, write it."""
    rows, metrics, detail = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model")
        for dtype in FORMATS:
            vllm = VllmEngine(dtype)
            engines: dict[str, InferenceEngine] = {
                "transformers": TransformersEngine(dtype),
                "vllm": vllm,
            }
            for engine in engines.values():
                engine.load_policy(model, PolicyVersion(0))
            for batch in BATCHES:
                found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
                for call in range(CALLS):
                    for name, engine in engines.items():
                        rates = measure(engine, draw(batch, call))
                        found[name] += [rates] if call else []
                medians = {n: statistics.median(r for r, _ in f) for n, f in found.items()}
                ratio = medians["vllm"] / medians["transformers"]
                metrics[f"vllm_over_transformers_{dtype}_{batch}"] = ratio
                detail[f"{dtype}, batch {batch}"] = found
                rates_ = [f"{medians[name]:,.0f}" for name in ("vllm", "transformers")]
                rows.append([dtype, str(batch), *rates_, f"{ratio:.2f}"])
            vllm.close()
    print_table(
        f"completion tokens per CPU second, Qwen3 4 x 256, 32 + 64 tokens; {machine()}",
        ["format", "batch", "vLLM", "transformers", "ratio"],
        rows,
    )
    columns = ["tokens per CPU s", "tokens per s"]
    document = {"columns": columns, "measured": detail, "load": os.getloadavg()}
    write("engines", metrics, document, measured_on=machine())


if __name__ == "__main__":
    try:
        find_python()
    except EngineError as error:
        print(f"vLLM against transformers is not measured: {error}; {error.hint}")
    else:
        torch.set_num_threads(1)
        main()
