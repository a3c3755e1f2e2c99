"""Choosing a token and decoding at Qwen3-0.6B's size: over plain numpy, over Hugging Face.

CPU time of one thread; both sides take turns in one process.

* `choice_ratio`: noise and choice of one row of 151,936 by the plain numpy form over the compiled
  one, same ids and bytes of scores; the worst kind of logits counts.
* `generate_ratio_hf`, `generate_ratio_hf_800`: completion tokens per CPU second of our engine,
  proofs and verifiable sampling included, over those of `model.generate` with sampling, at 100 and
  800 positions. Steps only: what a prompt costs is taken off on our side, and its keys and
  values are given to Hugging Face's, which would compute them once per sample.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from muster.inference import sampling
from muster.inference.engine import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.recipe import ProofRecipe

KINDS = {"flat": 0.0, "ordinary": 1.0, "wide": 3.0, "peaked": 8.0}
"""Spread of normal logits, by kind."""
ROUNDS, ROWS = 9, 10
SAMPLES, STEPS = 8, 12


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
    """Return the CPU seconds of a decoding step at so many positions, of both sides."""
    prompt = tuple(range(10, 10 + width - STEPS))
    ours = _ours_s(engine, prompt, 1 + STEPS) - _ours_s(engine, prompt, 1)
    theirs = _theirs_s(folder, prompt)
    return {"ours_s": ours / STEPS, "hugging_face_s": theirs / STEPS, "ratio": theirs / ours}


def _ours_s(engine: TransformersEngine, prompt: tuple[int, ...], tokens: int) -> float:
    asked = [Request(prompt, seed, 1.0, tokens) for seed in range(SAMPLES)]
    started = time.process_time()
    made = engine.generate(asked, proof=ProofRecipe())
    seconds = time.process_time() - started
    assert all(len(c.tokens) == tokens for c in made), "a completion ended early"
    return seconds


def _theirs_s(folder: Path, prompt: tuple[int, ...]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    asked = torch.tensor([prompt])
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(asked[:, :-1], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(SAMPLES)
        # Top-k and top-p would cost extra; ours samples from the whole softmax.
        how = GenerationConfig(
            do_sample=True, top_k=0, min_new_tokens=STEPS, max_new_tokens=STEPS, pad_token_id=0
        )
        started = time.process_time()
        model.generate(asked.expand(SAMPLES, -1), past_key_values=cache, generation_config=how)
    return time.process_time() - started
