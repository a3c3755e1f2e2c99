"""Tiny chat models: templates in the form of known families, tokenizers with their marks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from muster.inference.framing import ChatTemplate

TEMPLATES = Path(__file__).with_name("chat_templates")


@dataclass(frozen=True)
class Family:
    """A family of chat models."""

    bos: str | None
    eos: str
    control: tuple[str, ...]
    """Special tokens other than BOS and EOS."""
    marks: tuple[str, ...] = ()
    """Added tokens that are not special: decoding keeps them in the text."""


FAMILIES = {
    "qwen": Family(
        None,
        "<|im_end|>",
        ("<|im_start|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
         "</tool_response>"),
    ),
    "llama": Family(
        "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")
    ),
    "mistral": Family(
        "<s>", "</s>", ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                        "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
    ),
}  # fmt: skip


def source_of(family: str) -> str:
    """Return a family's template."""
    return (TEMPLATES / f"{family}.jinja").read_text()


def template_of(family: str) -> ChatTemplate:
    """Return the template with the values of the tokens that it names."""
    named = {"bos_token": FAMILIES[family].bos, "eos_token": FAMILIES[family].eos}
    tokens = {name: token for name, token in named.items() if token}
    return ChatTemplate(source_of(family), tokens, (FAMILIES[family].eos,))


def make_chat_tokenizer(family: str, *, is_byte_level: bool = True) -> Any:
    """Return a BPE tokenizer of 300 tokens with a family's marks: of bytes, or with its blanks
    as signs and one before a text, as SentencePiece has it.
    """
    chosen = FAMILIES[family]
    special = [text for text in (chosen.bos, chosen.eos, *chosen.control) if text]
    core = Tokenizer(models.BPE(unk_token=None if is_byte_level else "<unk>"))
    core.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if is_byte_level
        else pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    )
    core.decoder = decoders.ByteLevel() if is_byte_level else decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", *special, *([] if is_byte_level else ["<unk>"])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if is_byte_level else list(_LETTERS),
        show_progress=False,
    )
    core.train_from_iterator([_LETTERS, "user assistant system the sum of\n\n" * 9], trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in chosen.marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token=chosen.bos,
        eos_token=chosen.eos,
        unk_token=None if is_byte_level else "<unk>",
        chat_template=source_of(family),
        model_max_length=4096,
    )


WORDS = ("system", "user", "assistant", *"0123456789= \n")
"""Characters that the smallest chat models can spell."""


def make_word_tokenizer() -> Any:
    """Return a tokenizer of two dozen tokens with marks of the Qwen family: random weights end a
    thought, and a turn, after a dozen tokens.
    """
    core = Tokenizer(
        models.WordLevel({text: i for i, text in enumerate(["<unk>", *WORDS])}, unk_token="<unk>")
    )
    pattern = "|".join([*WORDS[:3], r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    marks = ("<think>", "</think>", "<tool_response>", "</tool_response>")
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<unk>",
        unk_token="<unk>",
        chat_template=source_of("qwen"),
        model_max_length=4096,
    )


_LETTERS = "".join(map(chr, range(32, 127))) + "\n"


def build_chat_model(folder: Path, tokenizer: Any, *, seed: int = 0, context: int = 512) -> None:
    """Write a model of random weights with 64 hidden channels, and its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=context,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                dtype="float32",
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
