"""The engine knows no model by name: other families, some with capped or scaled logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_policy import CHARACTERS, EOS, PAD, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from muster.inference.engine import Request, Sample
from muster.inference.sampling import gumbel_noise
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

COMMON: dict[str, Any] = {
    "vocab_size": len(CHARACTERS) + 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

CONFIGURATIONS = {
    "llama": LlamaConfig(**COMMON),
    "sliding window": MistralConfig(**COMMON, sliding_window=4),
    "capped logits": Gemma2Config(**COMMON, final_logit_softcapping=0.5, query_pre_attn_scalar=16),
    "scaled logits": GraniteConfig(**COMMON, logits_scaling=3.0),
    "mixture of experts": Qwen2MoeConfig(
        **COMMON, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "learned positions": GPT2Config(
        vocab_size=COMMON["vocab_size"],
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    ),
}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
}
BY_LENGTH = {
    "dynamic": LlamaConfig(**COMMON, rope_parameters=DYNAMIC),
    "longrope": Phi3Config(**COMMON, rope_parameters=LONGROPE),
    "in some layers": Gemma3TextConfig(
        **COMMON,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": DYNAMIC,
        },
    ),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_positions_that_depend_on_the_length_are_refused(name: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(BY_LENGTH[name]).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, rope = BY_LENGTH[name].model_type, {"longrope": "longrope"}.get(name, "dynamic")
    with pytest.raises(EngineError, match=f"{model} has rotary embeddings of type {rope}") as found:
        engine_on(tmp_path)
    assert "default, linear, llama3, proportional, yarn" in str(found.value.hint)


@pytest.fixture(params=CONFIGURATIONS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    configuration: PretrainedConfig = CONFIGURATIONS[request.param]
    model = AutoModelForCausalLM.from_config(configuration)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def engine_on(folder: Path) -> TransformersEngine:
    engine = TransformersEngine()
    engine.load_policy(folder, PolicyVersion(0))
    return engine


PROMPTS = ((1, 2, 3, 4), (5, 6), (7, 8, 9, 1, 2, 3, 4), (5, 6))


def asked(limit: int = 10) -> list[Request]:
    return [Request(prompt, 100 + i, 1.0, limit) for i, prompt in enumerate(PROMPTS)]


def test_logits_are_the_model_s_own(folder: Path) -> None:
    samples = [(prompt, (3, 1, 4)) for prompt in PROMPTS]
    # Other kernels ignore a cap of attention scores.
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for (prompt, completion), computed in zip(
        samples, engine_on(folder).recompute(samples), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].numpy()
        assert computed.logits_TV == pytest.approx(expected, abs=1e-4)


def test_tokens_are_those_of_whole_forward_passes(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    completions = engine_on(folder).generate(asked(), proof=ProofRecipe())
    for request, completion in zip(asked(), completions, strict=True):
        tokens: list[int] = []
        while len(tokens) < 10 and EOS not in tokens:
            with torch.no_grad():
                logits = model(torch.tensor([[*request.prompt_tokens, *tokens]])).logits[0, -1]
            noise = gumbel_noise([request.seed], [len(tokens)], len(logits))[0]
            tokens.append(int(np.argmax(logits.numpy() + noise)))
        assert list(completion.tokens) == tokens


def test_decoding_agrees_with_examining(folder: Path) -> None:
    engine = engine_on(folder)
    made = engine.generate(asked(30), proof=ProofRecipe())
    samples = [
        Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs)
        for r, c in zip(asked(), made, strict=True)
    ]
    for found in engine.examine(samples, proof=ProofRecipe(), temperature=1.0):
        assert all(r.exponent_mismatches <= 2 and r.mantissa_error_mean < 0.1 for r in found.chunks)
        assert found.replayed.margins_T.max() < 1e-4


def test_weights_swap_in_place(folder: Path) -> None:
    engine = engine_on(folder)
    model, before = engine.model, engine.recompute([((1, 2), (3, 4))])[0].logits_TV
    engine.load_policy(folder, PolicyVersion(1))
    assert (engine.recompute([((1, 2), (3, 4))])[0].logits_TV == before).all()
    assert engine.model is model or "moe" in model.config.model_type
