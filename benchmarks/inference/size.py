"""Examining, choosing and decoding at users' size: Qwen3-0.6B's shape, 151,936 tokens, bfloat16.

    python -m benchmarks.inference.size [--parts long q06 mid choices hf100 hf800] [--again]

Random weights. One thread, CPU time. Each part runs in a separate process, for an hour at most, and
adds its figures to results/size.json when it ends. A part that was already measured at this commit
is skipped.

* long, `examine_gb_16k`: memory above the loaded model while one sample of 16,000 tokens is
  examined. The model has 2 layers of the shape: what a layer computes is dropped before the next,
  so that further ones take time and no memory.
* q06, `examine_over_generate_8x64`: CPU time of examining 8 samples of 64 tokens after one prompt
  of 16 over that of generating them, all 28 layers, in one run. `seam_bytes_per_token`: bytes of
  question and answer, headers and all, that vLLM's engine and its process would exchange about
  those samples, with fingerprints of seven validators.
* mid, `examine_over_generate_16x512`: the same of 8 layers of width 512, 16 samples of 512 tokens.
* choices, `choice_ratio`; hf100, `generate_ratio_hf`; hf800, `generate_ratio_hf_800`:
  `benchmarks.inference.decoding`.

A CPU that multiplies bfloat16 as float32 computes the same matrix products for both. So the detail
has the products per second of generating and of examining, beside the CPU's maximum.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks import report
from benchmarks.inference import decoding
from benchmarks.training.export import SHAPES, forget_peak, resident_bytes
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
LONG, PROMPT, SEATS = 16_000, 16, 7
PART_S = 3600.0
"""Seconds that a part may take."""

Figures = tuple[dict[str, float], dict[str, Any]]
"""Metrics by id, and details."""


@dataclass(frozen=True)
class Examination:
    """Results of examining samples."""

    samples: list[Sample]
    found: list[Examined]
    generate_s: float
    """Time of generating them."""
    examine_s: float
    """Time of examining them."""
    wrong: int
    """Tokens that the examination does not expect."""
    largest_margin: float
    """Largest margin of a token, in units of logit / T."""

    @property
    def ratio(self) -> float:
        """Time of examining divided by time of generating."""
        return self.examine_s / self.generate_s


def write_model(folder: Path, name: str, layers: int | None = None, vocab: int = VOCAB) -> None:
    """Write a model of a shape, of fewer layers and tokens if wanted, and a tokenizer of single
    digits.
    """
    torch.manual_seed(0)
    shape = SHAPES[name]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=layers or shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"] // 2,
        head_dim=128 if name == "q06" else 64,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        eos_token_id=vocab - (VOCAB - EOS),
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


class Run(NamedTuple):
    """Inputs of a part: a folder with a model, and an engine that loaded it."""

    folder: Path
    engine: TransformersEngine


def measure_long(run: Run) -> Figures:
    """Measure memory and time of one long sample, above what the model takes by itself."""

    def examine(count: int) -> None:
        pair = tuple(range(PROMPT)), tuple(7 * i % VOCAB for i in range(count - PROMPT))
        proof = PRIME.to_bytes(2, "big") + bytes(2 * PROOF.topk)
        proofs = [proof] * -(-len(pair[1]) // PROOF.chunk_tokens)
        run.engine.examine([Sample(*pair, 1, proofs)], proof=PROOF, temperature=1.0)

    examine(8 * PROMPT)
    before, started = resident_bytes("VmRSS"), time.process_time()
    forget_peak()
    examine(LONG)
    gb = (resident_bytes("VmHWM") - before) / 1e9
    return {"examine_gb_16k": gb}, {"tokens": LONG, "cpu_s": time.process_time() - started}


def examination(
    engine: TransformersEngine,
    samples: int,
    tokens: int,
    clock: Callable[[], float] = time.process_time,
) -> Examination:
    """Generate and examine samples of one prompt; return results and times by `clock`."""
    prompt = tuple(range(10, 10 + PROMPT))
    asked = [Request(prompt, seed, 1.0, tokens) for seed in range(samples)]
    started = clock()
    made = engine.generate(asked, proof=PROOF)
    generate_s = clock() - started
    block = sum(len(completion.tokens) for completion in made)
    shares = _shares(block, 0)
    claimed = [
        Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs, shares)
        for r, c in zip(asked, made, strict=True)
    ]
    started = clock()
    found = engine.examine(claimed, proof=PROOF, temperature=1.0)
    examine_s = clock() - started
    margins = [float(m) for each in found for m in each.replayed.margins_T]
    wrong = sum(margin > 0 for margin in margins)
    return Examination(claimed, found, generate_s, examine_s, wrong, max(margins))


def examined_again(
    engine: TransformersEngine, done: Examination, count: int, clock: Callable[[], float]
) -> float:
    """Return the time of the `count`-th examination of the same samples, for seats whose signs the
    engine has not seen.
    """
    shares = _shares(done.samples[0].shares[0].tokens, count)
    claimed = [replace(sample, shares=shares) for sample in done.samples]
    started = clock()
    engine.examine(claimed, proof=PROOF, temperature=1.0)
    return clock() - started


def _shares(tokens: int, count: int) -> tuple[Share, ...]:
    return tuple(Share(keccak(bytes([seat, count])), 0, tokens) for seat in range(SEATS))


def detail_of(done: Examination, engine: TransformersEngine) -> dict[str, Any]:
    """Return an examination's times, margins, and products a second."""
    weights = sum(p.numel() for p in engine.model.parameters())
    tokens = sum(len(sample.completion_tokens) for sample in done.samples)
    products = 2 * weights * tokens / 1e9
    return {
        "generate_s": done.generate_s,
        "examine_s": done.examine_s,
        "generate_gflop_per_s": products / done.generate_s,
        "examine_gflop_per_s": products / done.examine_s,
        "float32_gflop_per_s": float32_gflop_per_s(),
        "tokens": tokens,
        "wrong_tokens": done.wrong,
        "largest_margin": done.largest_margin,
    }


def float32_gflop_per_s() -> float:
    """Return this CPU's speed in products of large float32 matrices."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 3072)
    taken = []
    for _ in range(5):
        started = time.process_time()
        left @ right
        taken.append(time.process_time() - started)
    return 2 * 1024 * 1024 * 3072 / 1e9 / statistics.median(taken)


def seam_bytes_per_token(done: Examination) -> float:
    """Return the bytes that cross vLLM's seam per completion token."""
    crossing = [frames.examine_frame(done.samples, PROOF, 1.0)]
    crossing += [frames.examined_frame(place, each) for place, each in enumerate(done.found)]
    size = sum(len(json.dumps(frame.header)) + len(frame.body) for frame in crossing)
    return size / sum(len(sample.completion_tokens) for sample in done.samples)


def measure_q06(run: Run) -> Figures:
    """Measure examining beside generating, and what crosses vLLM's seam."""
    done = examination(run.engine, 8, 64)
    metrics = {
        "examine_over_generate_8x64": done.ratio,
        "seam_bytes_per_token": seam_bytes_per_token(done),
    }
    return metrics, detail_of(done, run.engine)


def measure_mid(run: Run) -> Figures:
    """Measure examining beside generating, of longer samples of a smaller model."""
    done = examination(run.engine, 16, 512)
    return {"examine_over_generate_16x512": done.ratio}, detail_of(done, run.engine)


def measure_choices(_run: Run) -> Figures:
    """Measure noise and choice of a row."""
    choices = decoding.measure_choices(VOCAB)
    return {"choice_ratio": min(row["ratio"] for row in choices.values())}, choices


def measure_generation(run: Run, width: int, name: str) -> Figures:
    """Measure generating up to `width` positions, compared with Hugging Face's."""
    found = decoding.measure_generation(run.engine, run.folder, width)
    return {name: found["ratio"]}, found


PARTS: dict[str, tuple[str, int | None, Callable[[Run], Figures]]] = {
    "long": ("q06", 2, measure_long),
    "q06": ("q06", None, measure_q06),
    "mid": ("mid", None, measure_mid),
    "choices": ("small", None, measure_choices),
    "hf100": ("q06", None, lambda run: measure_generation(run, 100, "generate_ratio_hf")),
    "hf800": ("q06", None, lambda run: measure_generation(run, 800, "generate_ratio_hf_800")),
}
"""The shape and number of layers of each part's model, and what measures it."""


def measure(part: str) -> Figures:
    """Return a part's figures, measured in this process."""
    shape, layers, measured = PARTS[part]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, layers)
        return measured(Run(Path(folder), engine_on(Path(folder))))


def measure_alone(part: str) -> Figures:
    """Return a part's figures, measured in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--alone", part]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PART_S)
    metrics, detail = json.loads(done.stdout.splitlines()[-1])
    return metrics, detail


def main() -> int:
    """Measure parts, print, add them to results/size.json; return how many failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", action="store_true", help="measure again what the file holds")
    parser.add_argument("--alone", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args.alone)))
        return 0
    failed = 0
    for part in args.parts:
        if not args.again and report.has_part("size", part):
            print(f"{part}: measured already")
            continue
        try:
            metrics, detail = measure_alone(part)
        except subprocess.SubprocessError as error:
            failed += 1
            print(f"{part}: {error}\n{getattr(error, 'stderr', '') or ''}", file=sys.stderr)
            continue
        report.add_part("size", part, metrics, detail)
    return failed


if __name__ == "__main__":
    sys.exit(main())
