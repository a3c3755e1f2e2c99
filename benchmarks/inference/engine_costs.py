"""What proofs cost a worker, and validation a validator: CPU time of the transformers engine.

A Qwen3 model of 4 layers x 256 with random weights and 44 tokens, so small a vocabulary that
logits and noise cost next to nothing and proofs weigh most; one thread, completions of 512 tokens
that never end early. Both are counted in CPU time of the whole process:

* proof overhead: handing hidden states over, rounding them and building proofs on their thread,
  over all of `TransformersEngine.generate`;
* validation over generation: the validator's own `replay_rows` (one prefill, proofs, sampling)
  over `generate`, for the same rollouts.

A rollout generated alone is the measure. Sixteen in one batch share every step's overhead, while
the validator's prefill is bound by matrix products either way; their ratio is printed too.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.report import print_table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from muster.client.validator.replay import replay_rows
from muster.inference import decode_loop
from muster.inference.engine import Completion, Request
from muster.inference.forward import to_rows
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.toploc import IncrementalBuilder

LAYERS, HIDDEN, VOCAB, TOKENS, PROMPT = 4, 256, 44, 512, 16
BATCHES = (1, 16)
ROUNDS = 3


@dataclass(frozen=True)
class Costs:
    """The engine's part of the benchmark's results."""

    metrics: dict[str, float]
    """Figures by id."""
    detail: list[dict[str, float]]
    """Seconds by batch."""


class Meter:
    """Adds up CPU seconds of calls, on whichever thread they run."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += time.thread_time() - started

        return counted


@contextmanager
def proofs_metered() -> Iterator[Meter]:
    """Count what the decode loop and the builder's thread spend on proofs."""
    meter = Meter()
    calls: dict[str, Any] = {n: meter.around(getattr(IncrementalBuilder, n)) for n in BUILDER_CALLS}
    rounding = mock.patch.object(decode_loop, "to_rows", meter.around(to_rows))
    with mock.patch.multiple(IncrementalBuilder, **calls), rounding:
        yield meter


BUILDER_CALLS = ("__init__", "extend", "end", "take", "close", "_work")


def write_model(folder: Path) -> None:
    """Write the model and a tokenizer of single characters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=PROMPT + TOKENS,
        # Beyond the vocabulary, so that no completion ends early.
        eos_token_id=VOCAB + 1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = {chr(ord("0") + i): i for i in range(VOCAB)} | {"<eos>": VOCAB + 1}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.save_pretrained(folder)


def requests_of(batch: int) -> list[Request]:
    """Return one group: a prompt, `batch` seeds."""
    prompt = tuple(range(PROMPT))
    return [Request(prompt, seed, 1.0, TOKENS) for seed in range(batch)]


def rollouts_of(requests: list[Request], completions: list[Completion]) -> list[Rollout]:
    """Return what a submission says of the completions."""
    return [
        Rollout("p", 0, i, r.seed, -1, 1, r.prompt_tokens, c.tokens, b"".join(c.proofs), 0.0)
        for i, (r, c) in enumerate(zip(requests, completions, strict=True))
    ]


def measure_batch(engine: TransformersEngine, recipe: Recipe, batch: int) -> dict[str, float]:
    """Return the medians of CPU seconds for one batch size."""
    requests = requests_of(batch)
    spent: dict[str, list[float]] = {"generate_s": [], "proofs_s": [], "validate_s": []}
    for _ in range(ROUNDS):
        with proofs_metered() as meter:
            started = time.process_time()
            completions = engine.generate(requests, proof=recipe.proof)
            spent["generate_s"].append(time.process_time() - started)
        spent["proofs_s"].append(meter.spent_s)
        assert all(len(c.tokens) == TOKENS for c in completions), "a completion ended early"
        started = time.process_time()
        replays = replay_rows(rollouts_of(requests, completions), engine, recipe)
        spent["validate_s"].append(time.process_time() - started)
        assert all(c.exponent_mismatches < 8 for r in replays for c in r.chunks), "proofs are wrong"
    return {"samples": batch, **{key: statistics.median(value) for key, value in spent.items()}}


def measure_engine() -> Costs:
    """Measure and print both ratios for every batch size."""
    sampling = SamplingRecipe(
        problems_per_submission=1, samples_per_problem=16, temperature=1.0, max_new_tokens=TOKENS
    )
    training = TrainingRecipe(submissions_per_step=1)
    recipe = Recipe(name="bench", sampling=sampling, training=training)
    engine = TransformersEngine()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        engine.load_policy(Path(folder), PolicyVersion(1))
    measured = [measure_batch(engine, recipe, batch) for batch in BATCHES]
    overheads = [row["proofs_s"] / row["generate_s"] for row in measured]
    ratios = [row["validate_s"] / row["generate_s"] for row in measured]
    print_table(
        f"CPU s of the transformers engine, {LAYERS} layers x {HIDDEN}, {TOKENS} tokens, float32",
        ["samples", "generate", "of it proofs", "share", "validate", "validate / generate"],
        [
            [
                str(row["samples"]),
                f"{row['generate_s']:.3f}",
                f"{row['proofs_s']:.4f}",
                f"{overhead:.2%}",
                f"{row['validate_s']:.4f}",
                f"1/{1 / ratio:.0f}",
            ]
            for row, overhead, ratio in zip(measured, overheads, ratios, strict=True)
        ],
    )
    metrics = {
        "proof_overhead": max(overheads),
        "validate_over_generate": ratios[0],
        "validate_over_generate_16": ratios[1],
    }
    return Costs(metrics, measured)
