"""Choosing a token and decoding at Qwen3-0.6B's size: over plain numpy, over Hugging Face.

CPU time of one thread; both sides take turns in one process.

* `choice_ratio`: noise and choice of one row of 151,936 by the plain numpy form over the compiled
  one, same ids and bytes of scores; the worst kind of logits counts.
* `generate_ratio_hf`, `generate_ratio_hf_800`: completion tokens per CPU second of our engine,
  proofs and verifiable sampling included, over those of `model.generate` with sampling: 8 samples
  of one prompt, 64 tokens each, up to 100 and 800 positions. Hugging Face's computes the prompt
  once per sample; a step of either side is mostly the same matrix products.
"""

import statistics
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from muster.inference import sampling
from muster.inference.engine import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.recipe import ProofRecipe

KINDS = {"flat": 0.0, "ordinary": 1.0, "wide": 3.0, "peaked": 8.0}
"""Spread of normal logits, by kind."""
ROUNDS, ROWS = 9, 10
SAMPLES, TOKENS = 8, 64


def measure_choices(vocab: int) -> dict[str, dict[str, float]]:
    """Return per kind of logits the CPU microseconds of a row, plain and compiled, and the ratio of
    their medians."""
    rng = np.random.default_rng(0)
    one, found = np.ones(1, np.float32), {}
    for kind, spread in KINDS.items():
        row = (rng.standard_normal((1, vocab)) * spread).astype(np.float32)
        taken: dict[str, list[float]] = {"plain": [], "compiled": []}
        for turn in range(ROUNDS):
            places = range(turn * ROWS, turn * ROWS + ROWS)
            with mock.patch.object(sampling, "load_kernel", return_value=None):
                plain = _timed(row, one, places, taken["plain"])
            assert _timed(row, one, places, taken["compiled"]) == plain, "the choices differ"
        medians = {form: 1e6 * statistics.median(times) for form, times in taken.items()}
        found[kind] = {**medians, "ratio": medians["plain"] / medians["compiled"]}
    return found


def _timed(
    row: sampling.Noise, one: sampling.Noise, places: range, taken: list[float]
) -> list[bytes]:
    started = time.thread_time()
    chosen = [sampling.winners(row, [7], [place], one) for place in places]
    taken.append((time.thread_time() - started) / len(places))
    return [part.tobytes() for pair in chosen for part in pair]


def measure_generation(engine: TransformersEngine, folder: Path, width: int) -> dict[str, float]:
    """Return tokens per CPU second of both sides, up to `width` positions, and their ratio."""
    prompt = tuple(range(10, 10 + width - TOKENS))
    asked = [Request(prompt, seed, 1.0, TOKENS) for seed in range(SAMPLES)]
    started = time.process_time()
    made = engine.generate(asked, proof=ProofRecipe())
    ours = sum(len(completion.tokens) for completion in made) / (time.process_time() - started)
    theirs = SAMPLES * TOKENS / _theirs_s(folder, prompt)
    return {"ours": ours, "hugging_face": theirs, "ratio": ours / theirs}


def _theirs_s(folder: Path, prompt: tuple[int, ...]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    # Top-k and top-p would cost extra; ours samples from the whole softmax.
    how = GenerationConfig(
        do_sample=True, top_k=0, min_new_tokens=TOKENS, max_new_tokens=TOKENS, pad_token_id=0
    )
    asked = torch.tensor([prompt]).expand(SAMPLES, -1)
    started = time.process_time()
    model.generate(asked, attention_mask=torch.ones_like(asked), generation_config=how)
    return time.process_time() - started
