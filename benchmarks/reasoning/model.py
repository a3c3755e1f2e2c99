"""A small chat model before it has read anything: a tokenizer of the texts, and random weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
THINK, THOUGHT = "<think>", "</think>"
CONTEXT = 256
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""A chat template with a thinking switch: an answer begins within the thought, or after an empty
one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model, a Qwen3."""

    layers: int = 3
    hidden: int = 256
    """Width; the feed-forward part is 8/3 times as wide."""
    heads: int = 8
    """Attention heads, half as many for keys and values."""
    vocabulary: int = 448
    """Tokens, the 256 bytes and the control tokens among them."""


def build_model(folder: Path, texts: Iterable[str], shape: Shape, seed: int) -> int:
    """Write a model of random weights with a tokenizer of the texts; returns its parameters."""
    tokenizer = train_tokenizer(texts, shape.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(_config(tokenizer, shape))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weights.numel() for weights in model.parameters())


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Return a byte-pair tokenizer of these texts, in which every digit is a token of its own."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    marks = (THINK, THOUGHT)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(marks),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def _config(tokenizer: Any, shape: Shape) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=8 * shape.hidden // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
