"""The demo's base model: the same bytes for a seed, loadable, right one time in three."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.tasks.toys import split_sort
from muster.trainer.base_model import EOS, LESSONS, WarmStart, build_base_model, make_tokenizer
from muster.trainer.config import load_recipe
from muster.trainer.measure.evaluate import Evaluator

CHARACTERS = "".join(LESSONS["sort"].pieces)
TOKENIZER = make_tokenizer(CHARACTERS)
CONFIG = Path(__file__).parents[3] / "configs" / "demo.toml"


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_model_is_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    short = WarmStart(steps=3, batch=8)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        build_base_model(tmp_path / name, seed=seed, warm_start=short)
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    assert _bytes(tmp_path / "a") != _bytes(tmp_path / "c")


def test_model_folder_loads_with_the_library_s_own_classes(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert 90_000 < sum(p.numel() for p in model.parameters()) < 110_000
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


@given(st.text(alphabet=CHARACTERS, min_size=1))
def test_each_known_character_is_one_token(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert len(tokens) == len(text)
    assert TOKENIZER.decode(tokens) == text


@given(st.text(max_size=20))
def test_unknown_characters_are_one_token_each(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert len(tokens) <= len(text)
    assert all(0 <= token < 16 for token in tokens)


def test_eos_is_dropped_from_text() -> None:
    tokens = TOKENIZER.encode(f"12{EOS}")
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == "12"


def test_demonstrations_are_right_as_often_as_planned() -> None:
    plan, rng = WarmStart(), random.Random(0)
    right = Counter[bool]()
    for _ in range(3000):
        shown = LESSONS["sort"].demonstrate(rng, plan.right)
        prompt, answer = shown.prompt.removesuffix("="), shown.parts[0][0]
        assert sorted(answer) == sorted(prompt)
        right[answer == "".join(sorted(prompt))] += 1
    assert 0.34 < right[True] / 3000 < 0.42


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_base_model_is_right_about_one_time_in_three(tmp_path: Path, seed: int) -> None:
    build_base_model(tmp_path / "model", seed=seed)
    _, held_out = split_sort(2048, 256, seed)
    evaluator = Evaluator(held_out, TransformersEngine(), load_recipe(CONFIG))
    reward = evaluator.evaluate(tmp_path / "model", PolicyVersion(0)).reward.value
    assert 0.2 <= reward <= 0.45
