"""Base models larger than the demo's, built in minutes: Qwen3, characters as tokens.

    python -m benchmarks.proofs.base_models 4x256 benchmarks/.models/4x256

Layers x width. Each is trained on endless synthetic text (sums, sorted and reversed strings, plain
sentences), drawn from a seed; the same seed gives the same corpus, and the same weights on the same
machine. Used by the calibration's figures (docs/proofs.md) and its slow tests. Axes: B documents,
T tokens.
"""

import argparse
import math
import random
import string
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = string.digits + string.ascii_lowercase + " +=;:.,|"
CONTEXT = 256

NAMES = ("anna", "ben", "carl", "dora", "emil", "frida", "gus", "hanna", "ivan", "julia", "kurt")
VERBS = ("sees", "finds", "takes", "gives", "draws", "keeps", "sells", "makes", "counts", "likes")
THINGS = ("two apples", "a red book", "the old boat", "some bread", "three coins", "a small bird")


@dataclass(frozen=True, slots=True)
class Size:
    """A model and how long it is trained."""

    layers: int
    """Decoder layers."""
    hidden: int
    """Width of a hidden state."""
    steps: int
    """Optimiser steps."""
    batch: int = 24
    """Documents per step."""
    learning_rate: float = 1.5e-3
    """Peak of AdamW's learning rate."""


SIZES = {
    "2x64": Size(2, 64, 500, batch=48, learning_rate=4e-3),
    "2x128": Size(2, 128, 400, learning_rate=3e-3),
    "4x128": Size(4, 128, 400, learning_rate=3e-3),
    "4x256": Size(4, 256, 400),
    "8x256": Size(8, 256, 300),
    "8x512": Size(8, 512, 300, learning_rate=8e-4),
}


def shortened(name: str, steps: int) -> Size:
    """Return a size that is trained for fewer steps."""
    return replace(SIZES[name], steps=steps)


def build(size: Size, folder: Path, *, seed: int = 0) -> float:
    """Write the trained model and its tokenizer to `folder`; return the loss of its last steps."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(size, tokenizer))
        loss = _train(model, tokenizer, size, random.Random(seed))
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def make_tokenizer() -> Any:
    """Return the tokenizer that maps each known character to one token."""
    vocabulary = {text: i for i, text in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=CONTEXT
    )


def statement(rng: random.Random) -> str:
    """Return one line of the corpus."""
    kind = rng.randrange(4)
    if kind == 0:
        a, b = rng.randrange(1000), rng.randrange(1000)
        return f"{a}+{b}={a + b}; "
    if kind == 1:
        digits = "".join(rng.choices(string.digits, k=rng.randint(3, 9)))
        return f"sort {digits}: {''.join(sorted(digits))}; "
    if kind == 2:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 7)))
        return f"turn {word}: {word[::-1]}; "
    return f"{rng.choice(NAMES)} {rng.choice(VERBS)} {rng.choice(THINGS)}. "


def prompt(rng: random.Random) -> str:
    """Return a prompt as the corpus begins: one whole line and the start of another."""
    first, second = statement(rng), statement(rng)
    return first + second[: rng.randint(1, len(second) - 2)]


def _document(rng: random.Random, tokens: int, tokenizer: Any) -> list[int]:
    ids: list[int] = []
    while len(ids) <= tokens:
        text = "".join(statement(rng) for _ in range(rng.randint(3, 12)))
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return ids[: tokens + 1]


def _config(size: Size, tokenizer: Any) -> Any:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=max(2, size.hidden // 64),
        num_key_value_heads=max(1, size.hidden // 128),
        head_dim=32 if size.hidden < 128 else 64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _train(model: Any, tokenizer: Any, size: Size, rng: random.Random) -> float:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    tail: list[float] = []
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * _schedule(step, size.steps)
        tokens_BT = torch.tensor([_document(rng, 128, tokenizer) for _ in range(size.batch)])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=size.hidden >= 256):
            logits_BTV = model(input_ids=tokens_BT[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.float().flatten(0, 1), tokens_BT[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tail = [*tail[-19:], float(loss.detach())]
    return sum(tail) / len(tail)


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main() -> None:
    """Build one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    started_s = time.process_time()
    loss = build(SIZES[given.size], given.folder, seed=given.seed)
    spent_s = time.process_time() - started_s
    print(f"{given.folder}: loss {loss:.3f} after {spent_s:.0f} CPU s", file=sys.stderr)


if __name__ == "__main__":
    main()
