"""`muster economics` of files: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from muster.devnet.economics import economics
from muster.protocol.errors import ConfigError
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, ChunkLimits, Measurement, SamplerLimits

DEMO = str(Path(__file__).parents[3] / "configs" / "demo.toml")


@pytest.fixture
def measured(tmp_path: Path) -> str:
    rows = [("constant", "nothing", 0), ("weights in int4", "cheap", 100), ("int8", "other", 320)]
    document = Calibration(
        model=CalibratedModel(
            name="m", architecture="A", hidden_size=64, vocab_size=32, engine="e, float32"
        ),
        chunk=ChunkLimits(
            max_exponent_mismatches=1,
            max_mantissa_error_mean=1,
            max_mantissa_error_median=1,
            max_sign_mismatches=1,
        ),
        sampler=SamplerLimits(margin=1, max_outside_per_sample=0),
        fraud_strikes=5,
        measured=tuple(
            Measurement.model_validate(
                {"name": n, "kind": k, "judged": "sample", "trials": 320, "accepted": a}
            )
            for n, k, a in rows
        ),
    )
    path = tmp_path / "calibration.json"
    path.write_bytes(document.to_bytes())
    return str(path)


def ask(*words: str) -> Result:
    return CliRunner().invoke(economics, words, catch_exceptions=False)


def answer(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(*words, "--json").stdout)
    return found


def test_the_demos_terms_make_cheating_a_loss(measured: str) -> None:
    found = answer("--recipe", DEMO, "--calibration", measured)
    assert found["safe"] is True
    assert found["cap_units"] is None
    assert {row["pays"] for row in found["workers"]} == {False}
    assert found["minimal_stake_wei"] == "0"


def test_rare_audits_make_it_pay_and_say_so(measured: str) -> None:
    words = ("--recipe", DEMO, "--calibration", measured, "--audit-rate", "0.02")
    found = answer(*words)
    assert found["safe"] is False
    assert any(row["pays"] for row in found["workers"])
    shown = ask(*words).stdout
    assert "cheating pays" in shown
    assert "lazy validator" in shown


def test_what_is_not_noticed_is_priced_by_what_it_must_save(measured: str) -> None:
    found = answer("--recipe", DEMO, "--calibration", measured)
    [tolerated] = [row for row in found["workers"] if row["adversary"] == "int8"]
    assert (tolerated["power"], tolerated["break_even_saving"]) == (0.0, 0.0)
    assert "if it saves any" in ask("--recipe", DEMO, "--calibration", measured).stdout


def test_given_amounts_replace_the_deployments(measured: str) -> None:
    words = ("--recipe", DEMO, "--calibration", measured, "--stake", "5000")
    found = answer(*words, "--required-stake", "1000", "--unvested", "2", "--trap-rate", "0.05")
    assert found["terms"]["required_stake"] == str(10**21)
    assert found["workers"][0]["sybils"] == 5
    lazy = found["judges"][0]
    assert int(lazy["profit_wei"]) < 0


def test_the_least_noticed_cheat_of_a_kind_stands_for_it(measured: str) -> None:
    words = ("--recipe", DEMO, "--calibration", measured)
    assert "constant" not in ask(*words).stdout
    assert "constant" in ask(*words, "--all").stdout


def test_nothing_to_judge_is_refused() -> None:
    with pytest.raises(ConfigError, match="what is to be judged"):
        ask("--recipe", DEMO)


def test_a_run_without_its_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="by hash alone"):
        ask("--run", "1")


def test_an_exact_fraud_that_costs_less_is_refused(measured: str) -> None:
    with pytest.raises(ConfigError, match="cannot cost less"):
        ask("--recipe", DEMO, "--calibration", measured, "--fraud-ppm", "600000")
