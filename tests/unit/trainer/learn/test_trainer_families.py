"""Architectures: dense families have the gradient of whole logits, experts are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_fakes import make_recipe
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from worlds.tiny_shapes import COMMON, GEMMA

from muster.protocol.errors import ConfigError, EngineError
from muster.trainer.create import model_files
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import MemoryChoices, Planner
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.learn.passes import Passes

DENSE = {
    "Qwen2": Qwen2Config(**COMMON),
    "Qwen3, tied": Qwen3Config(**COMMON, tie_word_embeddings=True),
    "Qwen3, untied": Qwen3Config(**COMMON, tie_word_embeddings=False),
    "Llama": LlamaConfig(**COMMON),
    "Mistral": MistralConfig(**COMMON, sliding_window=4),
    "Gemma 2": Gemma2Config(**GEMMA, sliding_window=4, final_logit_softcapping=30.0),
    "Gemma 3": Gemma3TextConfig(**GEMMA, sliding_window=4),
}
TEMPERATURE = 0.8
SAMPLES = [
    TrainingSample((3, 4, 5), (6, 7, 8, 9, 1), 1.0, 0),
    TrainingSample((3, 4, 5), (9, 5, 1), -1.0, 0),
    TrainingSample((12,), (3, 30, 31, 7, 3, 2, 1), 0.5, 0),
]


def _model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    return model.to(torch.float64).train()


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def _expected(config: Any) -> dict[str, Tensor]:
    """Return the gradient of the weighted log-probabilities, out of each sample's whole logits."""
    model = _model(config)
    for sample in SAMPLES:
        prompt, completion = list(sample.prompt_tokens), list(sample.completion_tokens)
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0]
        logp = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
        own = logp[torch.arange(len(completion)), completion].sum()
        (own * sample.advantage).backward()
    return _gradients(model)


@pytest.mark.parametrize("micro_batch_tokens", [1000, 8])
@pytest.mark.parametrize("name", DENSE)
def test_gradient_is_that_of_whole_logits(name: str, micro_batch_tokens: int) -> None:
    model = _model(DENSE[name])
    passes = Passes(
        model, lambda _: None, temperature=TEMPERATURE, micro_batch_tokens=micro_batch_tokens
    )
    for batch in passes.pack(SAMPLES):
        weight_N = torch.tensor([SAMPLES[i].advantage for i in batch.order])[batch.row_N]

        def objective(
            logp_R: Tensor, _: Tensor, rows: slice, weight_N: Tensor = weight_N
        ) -> Tensor:
            return logp_R * weight_N[rows]

        total, _, _ = passes.objective(batch, objective)
        total.backward()
    found, expected = (
        torch.cat([g.flatten() for g in of.values()])
        for of in (_gradients(model), _expected(DENSE[name]))
    )
    # Norms and rotary tables of transformers are in float32, whatever the weights are.
    assert float((found - expected).norm() / expected.norm()) < 1e-6


EXPERTS = Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(EXPERTS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="qwen3_moe is a mixture of 4 experts"):
        Learner(tmp_path, make_recipe(), published=lambda _: None)


def test_positions_that_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(**COMMON, rope_parameters=dynamic)
    with pytest.raises(EngineError, match="llama has rotary embeddings of type dynamic"):
        Planner(config, make_recipe(), MemoryChoices())
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="of type dynamic"):
        Learner(tmp_path, make_recipe(), published=lambda _: None)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(EngineError, match="of type dynamic"):
        model_files(tmp_path)


def test_experts_are_refused_before_anything_is_planned() -> None:
    with pytest.raises(ConfigError, match="mixture of 4 experts"):
        Planner(EXPERTS, make_recipe(), MemoryChoices())
