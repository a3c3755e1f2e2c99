"""The demo's base model: a Qwen3 of 0.1M parameters that can almost sort digits.

Only the demo and tests use it; the trainer takes any causal language model folder. Demonstrations
are right with probability 0.35 only and otherwise follow another strategy (descending, reversed,
shuffled). The supervised optimum is therefore to reproduce the mixture: the model starts with a
reward near 0.3 however long it is warmed up, and reinforcement learning has to find the right mode.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from muster.tasks.sort_digits import prompt_of

CHARACTERS = "0123456789= |"
"""What the tokenizer knows; anything else is <unk>."""
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How the base model is warmed up."""

    digits: int = 4
    """Digits to sort."""
    right: float = 0.35
    """Share of demonstrations that are right."""
    steps: int = 250
    """Optimiser steps."""
    batch: int = 128
    """Demonstrations per step."""
    learning_rate: float = 4e-3
    """Peak learning rate; 20 steps of linear warm-up, then a cosine to zero."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How large the base model is."""

    layers: int = 2
    """Decoder layers."""
    hidden: int = 64
    """Width; the feed-forward part is three times as wide."""
    heads: int = 2
    """Attention heads, half as many for keys and values."""
    initializer_range: float = 0.05
    """Standard deviation of the weights before the warm start."""


def build_base_model(
    folder: Path,
    *,
    seed: int,
    warm_start: WarmStart | None = None,
    shape: ModelShape | None = None,
) -> None:
    """Write config, tokenizer and float32 weights to `folder`; the same bytes for the same seed.

    Loadable by AutoModelForCausalLM and AutoTokenizer. Takes about 10 CPU seconds as it stands.
    """
    plan = warm_start or WarmStart()
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(tokenizer, shape or ModelShape()))
        _warm_up(model, tokenizer, plan, random.Random(seed))
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> Any:
    """Return the tokenizer that maps each known character to one token."""
    vocabulary = {text: i for i, text in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=128
    )


def _config(tokenizer: Any, shape: ModelShape) -> Any:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _warm_up(model: Any, tokenizer: Any, plan: WarmStart, rng: random.Random) -> None:
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    prompt_length = len(prompt_of("0" * plan.digits))
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * _schedule(step, plan.steps)
        texts = [_demonstration(plan, rng) for _ in range(plan.batch)]
        tokens_BT = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
        logits_BTV = model(input_ids=tokens_BT[:, :-1]).logits[:, prompt_length - 1 :]
        targets_BC = tokens_BT[:, prompt_length:]
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BC.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _demonstration(plan: WarmStart, rng: random.Random) -> str:
    text = f"{rng.randrange(10**plan.digits):0{plan.digits}d}"
    if rng.random() < plan.right:
        answer = "".join(sorted(text))
    else:
        answer = rng.choice([_descending, _reversed, _shuffled])(text, rng)
    return f"{prompt_of(text)}{answer}{EOS}"


def _descending(text: str, _rng: random.Random) -> str:
    return "".join(sorted(text, reverse=True))


def _reversed(text: str, _rng: random.Random) -> str:
    return text[::-1]


def _shuffled(text: str, rng: random.Random) -> str:
    return "".join(rng.sample(text, len(text)))
