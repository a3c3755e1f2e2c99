"""The demo's base model: a Qwen3 of 0.1M parameters that can almost sort digits.

Only the demo, the examples and tests use it; the trainer takes any causal language model folder.
It is warmed up on demonstrations of a lesson, each right with probability 0.35 only. The supervised
optimum reproduces that mixture: however long the warm-up, the model starts with a reward near 0.3,
and reinforcement learning has to find the right answers.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from muster.protocol.errors import ConfigError
from muster.protocol.prompts import request_length
from muster.tasks import TaskSet
from muster.tasks.completions import THOUGHT_END
from muster.tasks.python_tool import AFTER, BEFORE
from muster.tasks.toys import FACTORS, product_prompt, sort_prompt, split_products, split_sort

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


BUDGETS = (8, 12, 16, 20)
"""Length budgets of the lesson `length`, those of configs/example-length.toml."""
LONGEST_THOUGHT = 18
"""Dots in the longest demonstration of the lesson `length`."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A sequence to learn from."""

    prompt: str
    """The text before the learned pieces."""
    parts: tuple[tuple[str, bool], ...]
    """The pieces that follow, each with a flag: is it learned? Replies of a tool are not."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A task, and demonstrations of it."""

    pieces: tuple[str, ...]
    """The tokenizer's tokens; any other character becomes <unk>."""
    demonstrate: Callable[[random.Random, float], Demonstration]
    """Draws a demonstration; the number is the probability that it is right."""
    split: Callable[[int, int, int], tuple[TaskSet, TaskSet]]
    """Returns training and held-out problems; the arguments are both counts and a seed."""


# sort: the lesson of the demo


def sort_answer(digits: str, rng: random.Random, right: float) -> str:
    """Return the digits sorted with probability `right`, else in another order."""
    if rng.random() < right:
        return "".join(sorted(digits))
    return rng.choice([_descending, _reversed, _shuffled])(digits, rng)


def _descending(text: str, _rng: random.Random) -> str:
    return "".join(sorted(text, reverse=True))


def _reversed(text: str, _rng: random.Random) -> str:
    return text[::-1]


def _shuffled(text: str, rng: random.Random) -> str:
    return "".join(rng.sample(text, len(text)))


def _digits(rng: random.Random) -> str:
    return f"{rng.randrange(10_000):04d}"


def _demonstrate_sorting(rng: random.Random, right: float) -> Demonstration:
    digits = _digits(rng)
    return Demonstration(sort_prompt(digits), ((sort_answer(digits, rng, right), True),))


# length: sort after a thought of dots; the number of dots does not depend on the budget


def _demonstrate_thinking(rng: random.Random, right: float) -> Demonstration:
    digits = _digits(rng)
    thought = "." * rng.randint(0, LONGEST_THOUGHT) + THOUGHT_END
    answer = sort_answer(digits, rng, right)
    prompt = request_length(sort_prompt(digits), rng.choice(BUDGETS))
    return Demonstration(prompt, ((thought + answer, True),))


_REQUEST = request_length("-", 0)[1:].split("0")
"""The words around a budget, each of them a token."""

# calculator: let the Python tool multiply and copy its reply; or guess, ask or copy wrongly

CALL, CALLED = "```python\nprint(", ")\n```"


def _demonstrate_calling(rng: random.Random, right: float) -> Demonstration:
    a, b = rng.choice(FACTORS), rng.choice(FACTORS)
    prompt = product_prompt(a, b)
    if rng.random() < right:
        return Demonstration(prompt, _called(f"{a}*{b}", a * b, str(a * b)))
    way = rng.choice(["guess", "guess", "ask wrongly", "copy wrongly"])
    if way == "guess":
        return Demonstration(prompt, ((str(rng.randrange(100, 10_000)), True),))
    if way == "ask wrongly":
        return Demonstration(prompt, _called(f"{a}+{b}", a + b, str(a + b)))
    return Demonstration(prompt, _called(f"{a}*{b}", a * b, _shuffled(str(a * b), rng)))


def _called(program: str, output: int, answer: str) -> tuple[tuple[str, bool], ...]:
    call = f"{CALL}{program}{CALLED}"
    return ((call, True), (f"{BEFORE}{output}{AFTER}", False), (answer, True))


LESSONS: Mapping[str, Lesson] = {
    "calculator": Lesson(
        (*"0123456789*+=", CALL, CALLED, BEFORE, AFTER), _demonstrate_calling, split_products
    ),
    "sort": Lesson(tuple("0123456789= |"), _demonstrate_sorting, split_sort),
    "length": Lesson((*"0123456789=.", THOUGHT_END, *_REQUEST), _demonstrate_thinking, split_sort),
}
"""The lessons by name."""


def lesson_of(name: str) -> Lesson:
    """Return a lesson; raises ConfigError when there is none of that name."""
    if name not in LESSONS:
        raise ConfigError(f"no lesson is called {name!r}", hint=f"use one of {', '.join(LESSONS)}")
    return LESSONS[name]


# The model


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the supervised warm start."""

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
    """Size of the base model."""

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
    lesson: Lesson = LESSONS["sort"],
    warm_start: WarmStart | None = None,
    shape: ModelShape | None = None,
) -> None:
    """Write config, tokenizer and float32 weights to `folder`; the same bytes for the same seed.

    AutoModelForCausalLM and AutoTokenizer can load it. With the defaults it takes about 10 CPU
    seconds.
    """
    plan = warm_start or WarmStart()
    tokenizer = make_tokenizer(lesson.pieces)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(tokenizer, shape or ModelShape()))
        _warm_up(model, _Teacher(tokenizer, lesson, plan, random.Random(seed)), plan)
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(pieces: Sequence[str]) -> Any:
    """Return the tokenizer that maps each piece to one token, and any other character to <unk>."""
    vocabulary = {text: i for i, text in enumerate([PAD, EOS, UNK, *pieces])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    longest_first = sorted((p for p in pieces if len(p) > 1), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
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


class _Teacher:
    """Draws batches of demonstrations."""

    def __init__(self, tokenizer: Any, lesson: Lesson, plan: WarmStart, rng: random.Random) -> None:
        # The bare Rust core, without its Python wrapper, saves a quarter of the warm start.
        self._core = tokenizer.backend_tokenizer
        self._ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._lesson = lesson
        self._plan = plan
        self._rng = rng

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [B, T], padded on the right, and a mask of the learned ones."""
        rows = [
            self._row(self._lesson.demonstrate(self._rng, self._plan.right))
            for _ in range(self._plan.batch)
        ]
        width = max(len(tokens) for tokens, _ in rows)
        _, pad = self._ends
        tokens_BT = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in rows])
        taught_BT = torch.tensor([taught + [False] * (width - len(taught)) for _, taught in rows])
        return tokens_BT, taught_BT

    def _row(self, shown: Demonstration) -> tuple[list[int], list[bool]]:
        eos, _ = self._ends
        tokens: list[int] = []
        taught: list[bool] = []
        for text, is_taught in ((shown.prompt, False), *shown.parts):
            ids = self._core.encode(text, add_special_tokens=False).ids
            ids += [eos] * is_taught
            tokens += ids
            taught += [is_taught] * len(ids)
        return tokens, taught


def _warm_up(model: Any, teacher: _Teacher, plan: WarmStart) -> None:
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * _schedule(step, plan.steps)
        tokens_BT, taught_BT = teacher.batch()
        is_taught = taught_BT[:, 1:]
        logits_BTV = model(input_ids=tokens_BT[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV[is_taught], tokens_BT[:, 1:][is_taught])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
