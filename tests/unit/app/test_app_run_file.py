"""RUN.toml: known keys are read, flags override them, unknown keys are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from muster.app.run_file import RunFile, read_run
from muster.client.quantities import WEI_PER_TOKEN as TOKEN, parse_tokens
from muster.protocol.errors import ConfigError
from muster.protocol.ids import to_address

ROOT = Path(__file__).parents[3]
ADDRESS = to_address(b"\x5a" * 20)
OTHER = to_address(b"\x5b" * 20)
FLAGS = {
    "keystore": "owner.json",
    "orchestrator": ADDRESS,
    "validators": (ADDRESS, OTHER),
    "quorum": 1,
    "model": "model",
    "recipe": "demo",
    "task_set": "tasks.jsonl",
    "calibration": "calibration.json",
    "price": "5",
    "store": "store",
    "documents": "documents",
}


def read(**changes: Any) -> RunFile:
    return read_run(None, FLAGS | changes)


def test_example_is_a_run() -> None:
    found = read_run(ROOT / "examples" / "run.toml", {})
    assert found.engines == ("transformers:float32",)
    assert (found.price, found.fund) == (10**15, 1000 * 10**18)
    assert (found.quorum, len(found.validators)) == (2, 3)


def test_flags_go_before_the_file() -> None:
    flags = {"fund": "2 tokens", "validators": (ADDRESS,), "quorum": 1, "steps": None}
    found = read_run(ROOT / "examples" / "run.toml", flags)
    assert (found.fund, found.validators, found.quorum) == (2 * 10**18, (ADDRESS,), 1)
    assert found.steps == 2


def test_plan_is_what_the_flags_say() -> None:
    plan = read(fund="7", steps=9).plan(OTHER, admit_anyway=True)
    assert (plan.price_wei, plan.fund_wei, plan.quorum) == (5 * TOKEN, 7 * TOKEN, 1)
    assert plan.validators == (ADDRESS, OTHER)
    assert plan.trainer == OTHER
    assert plan.recipe.training.steps == 9
    assert (plan.admits_anyway, plan.accepts_unsafe_economics) == (True, False)
    assert read(trainer=ADDRESS).plan(OTHER).trainer == ADDRESS


@pytest.mark.parametrize("text", ["1234.5", "1,234.5", "1234.5 tokens", "1,234.5 tokens"])
def test_amounts_are_tokens_as_in_other_commands(text: str) -> None:
    asked = read(price=text, fund=text)
    assert asked.price == asked.fund == parse_tokens(text) == 2469 * TOKEN // 2


def test_numbers_of_a_file_are_token_wei_as_in_network_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('price = 1_000_000\nfund = "7"\n')
    asked = read_run(path, {name: value for name, value in FLAGS.items() if name != "price"})
    assert (asked.price, asked.fund) == (10**6, 7 * TOKEN)


def test_nothing_may_be_paid_in(tmp_path: Path) -> None:
    assert read().fund == read(fund="0").fund == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quorum": 3}, "a quorum of 3 of 2 validators is impossible"),
        ({"fraud_ppm": 600_000}, "fraud_ppm 600000 is above exact_fraud_ppm 500000"),
        ({"orchestrator": "0x123"}, "orchestrator '0x123': not an account address"),
        ({"validators": (ADDRESS, "0x12")}, "validators '0x12': not an account address"),
        ({"engines": ("vllm:float32",)}, "cannot read calibration.json"),
    ],
)
def test_plan_that_cannot_be_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        read(**changes).plan(ADDRESS)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quorum": 0}, "setting 'quorum'"),
        ({"price": "0"}, "setting 'price': not an amount of tokens: '0'"),
        ({"price": "1 coin"}, "setting 'price': not an amount of tokens: '1 coin'"),
        ({"price": "x tokens"}, "not an amount of tokens: 'x'"),
        ({"price": 0}, "setting 'price'"),
        ({"fund": "-1"}, "setting 'fund': not an amount of tokens: '-1'"),
        ({"fraud_ppm": 1_000_001}, "setting 'fraud_ppm'"),
        ({"recipe": "no-such"}, "is neither a file nor a preset"),
        ({"keystore": None}, "setting 'keystore' is missing"),
        ({"colour": "red"}, "unknown setting 'colour'"),
    ],
)
def test_setting_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**changes)


def test_mistyped_key_of_a_file_is_named_with_the_close_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('validator = ["0x"]\n')
    with pytest.raises(ConfigError, match="unknown setting 'validator'") as caught:
        read_run(path, FLAGS)
    assert caught.value.hint == "did you mean 'validators'?"
