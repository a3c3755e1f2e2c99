"""The policy that every engine is compared on: small, of random weights, the same on every machine.

Qwen3 with heads of 32, which vLLM's attention on a CPU accepts, and a vocabulary that is no
multiple of anything that kernels pad to.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz,.:?!ABCDEFGHI"
PAD, EOS = 0, 1
FIRST = 2
VOCABULARY = FIRST + len(CHARACTERS)
HIDDEN = 128
CONTEXT = 128
"""Positions that prompt and completion share."""


def build_policy(folder: Path, seed: int) -> Path:
    """Write a policy folder; another seed gives other weights of the same shapes."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            # Large enough that a choice depends on all earlier tokens.
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if weight.dim() == 1 else 0.15 * noise)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": PAD, "<eos>": EOS}
    vocabulary |= {character: FIRST + i for i, character in enumerate(CHARACTERS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )
