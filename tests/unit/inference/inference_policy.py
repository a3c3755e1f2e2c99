"""A tiny policy like the demo's: Qwen3, 0.1M parameters, characters as tokens, briefly trained; and
how it is calibrated.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from muster.inference.calibration_plan import MeasuringPlan
from muster.inference.honest import Honest, measure_honest
from muster.inference.measuring import OwnParty
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe

CHARACTERS = "0123456789=abcdef"
EOS, PAD = len(CHARACTERS), len(CHARACTERS) + 1


def build_policy(
    folder: Path,
    *,
    seed: int = 0,
    training_steps: int = 60,
    tied: bool = True,
    constant_hidden_states: bool = False,
) -> Path:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(CHARACTERS) + 2,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=tied,
            max_position_embeddings=128,
            eos_token_id=EOS,
            pad_token_id=PAD,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(training_steps):
        tokens = _sorting_examples(64)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if constant_hidden_states:
        embeddings = model.get_input_embeddings().weight.data
        embeddings[:] = embeddings[0].clone()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _sorting_examples(count: int) -> torch.Tensor:
    digits = torch.randint(0, 10, (count, 4))
    equals = torch.full((count, 1), CHARACTERS.index("="))
    return torch.cat([digits, equals, digits.sort(dim=1).values, torch.full((count, 1), EOS)], 1)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)} | {"<eos>": EOS, "<pad>": PAD}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


RECIPE = Recipe(
    name="test",
    sampling=SamplingRecipe(
        problems_per_submission=8, samples_per_problem=16, temperature=1.0, max_new_tokens=5
    ),
    training=TrainingRecipe(submissions_per_step=4, learning_rate=5e-4),
)


def prompts(count: int, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    return ["".join(drawn.choices("0123456789", k=4)) + "=" for _ in range(count)]


def plan(count: int = 64, recipe: Recipe = RECIPE, **options: Any) -> MeasuringPlan:
    return MeasuringPlan(recipe, prompts(count), **{"profile": "quick", **options})


class HonestWork:
    """Measures a policy's honest work once per plan; later calls return the same figures."""

    def __init__(self) -> None:
        self._found: dict[object, Honest] = {}

    def measure(
        self, bench: OwnParty, others: Sequence[Any], requests: Any, plan: MeasuringPlan, tell: Any
    ) -> Honest:
        proofs = bench.engine.prove([((3, 4, 5), (6, 7))], proof=plan.recipe.proof)
        key = (repr(plan), repr(proofs))
        if key not in self._found:
            self._found[key] = measure_honest(bench, others, requests, plan, tell)
        found = self._found[key]
        return replace(
            found,
            errors=dict(found.errors),
            redrawn=dict(found.redrawn),
            shifts=dict(found.shifts),
            claimed=set(found.claimed),
        )
