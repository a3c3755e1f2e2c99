"""Examining, choosing and decoding at users' size: Qwen3-0.6B's shape, 151,936 tokens, bfloat16.

Random weights. One thread, CPU time of the whole process; memory of a process of its own.

* `examine_gb_16k`: memory above the loaded model while one sample of 16,000 tokens is examined, but
  for what is there within the attention of transformers, whose peak is `attention_gb` in the
  detail. The model has 2 layers of the shape for this: what a layer computes is dropped before the
  next, so that further ones take time and no memory.
* `examine_over_generate_8x64`: CPU time of examining 8 samples of one prompt of 16 tokens over that
  of generating them, all 28 layers, in one run. Generating computes the prompt once, examining for
  every sample.
* `seam_bytes_per_token`: bytes of question and answer, headers and all, that vLLM's engine and its
  process would exchange about those samples, with fingerprints of seven validators.
* `choice_ratio`, `generate_ratio_hf`, `generate_ratio_hf_800`: `benchmarks.inference.decoding`.

In the detail `export_peak_gb_mid` is what the end of a training step takes above training
(`benchmarks.training.export`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import report
from benchmarks.inference import decoding
from benchmarks.training.export import in_a_process
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from muster.inference.engine import Examined, Request, Sample, Share
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm import frames
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe
from muster.toploc.field import PRIME

VOCAB, EOS = 151_936, 151_645
PROOF = ProofRecipe()
LONG, PROMPT = 16_000, 16
SAMPLES, TOKENS, SEATS = 8, 64, 7
WIDTHS = (100, 800)
"""Positions up to which decoding is measured."""
ROUNDS = 3


@dataclass(frozen=True)
class Examination:
    """Samples, and what they show."""

    samples: list[Sample]
    found: list[Examined]
    ratio: float
    """CPU time of examining over generating."""
    seconds: list[tuple[float, float]]
    """Generating, examining; per round."""


def write_model(folder: Path, layers: int) -> None:
    """Write a model of Qwen3-0.6B's shape but for its depth, and a tokenizer of single digits."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({str(i): i for i in range(10)}, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)


def engine_on(folder: Path) -> TransformersEngine:
    """Return the engine with the model of a folder."""
    engine = TransformersEngine("bfloat16")
    engine.load_policy(folder, PolicyVersion(1))
    return engine


def memory_bytes(name: str) -> int:
    """Return a line of this process's memory, VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


class Peaks:
    """The largest memory of this process within a model's attention, and elsewhere."""

    def __init__(self, model: Any) -> None:
        self.elsewhere = self.attention = 0
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.before = memory_bytes("VmRSS")
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *_: self.take_elsewhere())
            layer.self_attn.register_forward_hook(lambda *_: self._take_attention())
        self._start()

    def take_elsewhere(self) -> None:
        """Count what was the largest size since the last attention."""
        self.elsewhere = max(self.elsewhere, memory_bytes("VmHWM") - self.before)
        self._start()

    def _take_attention(self) -> None:
        self.attention = max(self.attention, memory_bytes("VmHWM") - self.before)
        self._start()

    def _start(self) -> None:
        # Starts the record of the largest size anew.
        Path("/proc/self/clear_refs").write_text("5")


def examine_long(folder: Path, tokens: int) -> dict[str, float]:
    """Return the memory and time of one long sample, above what the model takes by itself."""
    engine = engine_on(folder)

    def examine(count: int) -> None:
        pair = tuple(range(PROMPT)), tuple(7 * i % VOCAB for i in range(count - PROMPT))
        proof = PRIME.to_bytes(2, "big") + bytes(2 * PROOF.topk)
        proofs = [proof] * -(-len(pair[1]) // PROOF.chunk_tokens)
        engine.examine([Sample(*pair, 1, proofs)], proof=PROOF, temperature=1.0)

    examine(8 * PROMPT)
    peaks, started = Peaks(engine.model), time.process_time()
    examine(tokens)
    peaks.take_elsewhere()
    return {
        "tokens": tokens,
        "gb": peaks.elsewhere / 1e9,
        "attention_gb": peaks.attention / 1e9,
        "cpu_s": time.process_time() - started,
    }


def examine_short(engine: TransformersEngine, rounds: int) -> Examination:
    """Return what 8 samples show, and what that costs beside generating them."""
    prompt = tuple(range(10, 10 + PROMPT))
    asked = [Request(prompt, seed, 1.0, TOKENS) for seed in range(SAMPLES)]
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        made = engine.generate(asked, proof=PROOF)
        generated = time.process_time()
        block = sum(len(completion.tokens) for completion in made)
        shares = tuple(Share(keccak(bytes([seat])), 0, block) for seat in range(SEATS))
        samples = [
            Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs, shares)
            for r, c in zip(asked, made, strict=True)
        ]
        begun = time.process_time()
        found = engine.examine(samples, proof=PROOF, temperature=1.0)
        seconds.append((generated - started, time.process_time() - begun))
    ratio = statistics.median(examining / generating for generating, examining in seconds)
    return Examination(samples, found, ratio, seconds)


def seam_bytes_per_token(done: Examination) -> float:
    """Return the bytes that cross vLLM's seam per completion token."""
    crossing = [frames.examine_frame(done.samples, PROOF.chunk_tokens, PROOF.topk, 1.0)]
    crossing += [frames.examined_frame(place, each) for place, each in enumerate(done.found)]
    size = sum(len(json.dumps(frame.header)) + len(frame.body) for frame in crossing)
    return size / sum(len(sample.completion_tokens) for sample in done.samples)


def examine_long_alone(tokens: int) -> dict[str, float]:
    """Return `examine_long` of a process in which nothing else was computed."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers=2)
        command = [sys.executable, "-m", __spec__.name, "--long", folder, "--tokens", str(tokens)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured: dict[str, float] = json.loads(printed)
    return measured


def main() -> None:
    """Measure, print, write results/size.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", type=Path, help="measure the memory of a model's folder only")
    parser.add_argument("--tokens", type=int, default=LONG)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    if args.long is not None:
        print(json.dumps(examine_long(args.long, args.tokens)))
        return
    long = examine_long_alone(args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers=28)
        engine = engine_on(Path(folder))
        short = examine_short(engine, args.rounds)
        generation = {
            width: decoding.measure_generation(engine, Path(folder), width) for width in WIDTHS
        }
    choices = decoding.measure_choices(VOCAB)
    report.print_table(
        f"{SAMPLES} samples of {TOKENS} tokens, CPU s",
        ["generate", "examine", "ratio"],
        [[f"{g:.2f}", f"{e:.2f}", f"{e / g:.3f}"] for g, e in short.seconds],
    )
    report.print_table(
        f"noise and choice of a row of {VOCAB:,}, CPU us",
        ["logits", "plain", "compiled", "ratio"],
        [
            [kind, f"{row['plain']:.0f}", f"{row['compiled']:.0f}", f"{row['ratio']:.1f}"]
            for kind, row in choices.items()
        ],
    )
    metrics = {
        "examine_gb_16k": long["gb"],
        "examine_over_generate_8x64": short.ratio,
        "seam_bytes_per_token": seam_bytes_per_token(short),
        "choice_ratio": min(row["ratio"] for row in choices.values()),
        "generate_ratio_hf": generation[100]["ratio"],
        "generate_ratio_hf_800": generation[800]["ratio"],
    }
    detail = {
        "long": long,
        "generate_and_examine_s": short.seconds,
        "choices_us": choices,
        "tokens_per_cpu_s": generation,
        "export_peak_gb_mid": in_a_process("mid")["peak_bytes"] / 1e9,
    }
    report.write("size", metrics, detail, measured_on=report.machine())


if __name__ == "__main__":
    main()
