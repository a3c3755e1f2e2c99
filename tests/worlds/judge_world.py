"""A judge that replies with JSON now and then: a tiny random model, some of whose tokens are whole
replies.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from muster.protocol.recipe import ProofRecipe
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, ChunkLimits, SamplerLimits

CHARACTERS = "0123456789abcdef"
SCORES = [f'{{"score": {score}}}' for score in range(0, 100, 4)]
ENDS = [f"<end{n}>" for n in range(25)]
LIMITS = Calibration(
    model=CalibratedModel(
        name="judge", architecture="Qwen3", hidden_size=64, vocab_size=19, engine="transformers"
    ),
    proof=ProofRecipe(),
    chunk=ChunkLimits(
        max_exponent_mismatches=8,
        max_mantissa_error_mean=0.25,
        max_mantissa_error_median=0.0,
        max_sign_mismatches=4,
    ),
    sampler=SamplerLimits(margin=0.001, max_outside_per_sample=0),
    fraud_strikes=1,
)


def build_judge(folder: Path, *, seed: int = 0) -> Path:
    """Write a judge's folder: about one in 7 replies is exactly a score."""
    words = [*CHARACTERS, *SCORES, *ENDS, "<other>"]
    ends = [words.index(end) for end in ENDS]
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=ends[0],
        pad_token_id=len(words) - 1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=ends, pad_token_id=len(words) - 1).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<other>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=ENDS[0], pad_token="<other>"
    ).save_pretrained(folder)
    return folder
