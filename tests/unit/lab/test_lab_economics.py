"""`muster economics` with files: its table, its JSON, and refusals."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from muster.deploy import DeployParameters
from muster.lab.economics import detection
from muster.lab.economics.command import bench_by, economics
from muster.protocol.errors import ConfigError
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, ChunkLimits, Measurement, SamplerLimits

DEMO = str(Path(__file__).parents[3] / "configs" / "demo.toml")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
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
    path = tmp_path_factory.mktemp("economics") / "calibration.json"
    path.write_bytes(document.to_bytes())
    return str(path)


def ask(*words: str) -> Result:
    return CliRunner().invoke(economics, words, catch_exceptions=False)


def read(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@cache
def answer(*words: str) -> dict[str, Any]:
    """Return the JSON output for some options; several tests use the same."""
    return read(ask(*words, "--json"))


@cache
def shown(*words: str) -> str:
    """Return the text output for some options."""
    return ask(*words).stdout


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
    text = shown(*words)
    assert "cheating pays" in text
    assert "lazy validator" in text


def test_what_is_not_noticed_is_priced_by_what_it_must_save(measured: str) -> None:
    found = answer("--recipe", DEMO, "--calibration", measured)
    [tolerated] = [row for row in found["workers"] if row["adversary"] == "int8"]
    assert (tolerated["power"], tolerated["break_even_saving"]) == (0.0, 0.0)
    assert "if it saves any" in shown("--recipe", DEMO, "--calibration", measured)


def test_given_amounts_replace_the_deployments(measured: str) -> None:
    words = ("--recipe", DEMO, "--calibration", measured, "--stake", "5000")
    found = answer(*words, "--required-stake", "1000", "--unvested", "2", "--trap-rate", "0.05")
    assert found["terms"]["required_stake"] == str(10**21)
    assert found["workers"][0]["sybils"] == 5
    lazy = found["judges"][0]
    assert int(lazy["profit_wei"]) < 0


def test_the_least_noticed_cheat_of_a_kind_stands_for_it(measured: str) -> None:
    words = ("--recipe", DEMO, "--calibration", measured)
    assert "constant" not in shown(*words)
    assert "constant" in ask(*words, "--all").stdout


def test_a_juror_gains_by_looking_while_its_fee_and_its_fine_are_worth_it(measured: str) -> None:
    found = answer("--recipe", DEMO, "--calibration", measured)
    away, guess = found["judges"][-2:]
    terms, bench = found["terms"], found["bench"]
    saved = bench["check_cost"] * terms["units_per_sample"] * terms["samples"]
    saved *= int(terms["price_wei"])
    fee, stake = int(bench["juror_fee"]), int(bench["juror_stake"])
    fine = stake * bench["absence_ppm"] / 10**6
    assert int(away["profit_wei"]) == pytest.approx(saved - fee - fine)
    assert int(guess["profit_wei"]) == pytest.approx(saved - fee / 2)
    assert int(away["profit_wei"]) < int(guess["profit_wei"]) < 0
    dear = answer("--recipe", DEMO, "--calibration", measured, "--price", str(10**18))
    assert all(int(row["profit_wei"]) > 0 for row in dear["judges"][-2:])


# What the red team measured


def figures(folder: Path, **changes: Any) -> str:
    """The output of `make bench-redteam` for three attacks."""
    rows = [
        {"attack": name, "title": f"attack {name}", "kind": kind, "unit": unit, "trials": 60}
        | {"caught": caught}
        for name, kind, unit, caught in (
            ("A16", "hard", "submission", 57),
            ("A15", "statistical", "submission", 60),
            ("A26", "economic", "case", 60),
        )
    ]
    path = folder / "redteam.json"
    path.write_text(json.dumps({"date": "2026-01-02", "detail": rows} | changes))
    return str(path)


def exact(found: dict[str, Any], check: str) -> float:
    [power] = [row["power"] for row in found["workers"] if check in row["adversary"]]
    return float(power)


def test_exact_checks_notice_what_the_red_team_measured(measured: str, tmp_path: Path) -> None:
    words = ("--recipe", DEMO, "--calibration", measured, "--redteam", figures(tmp_path))
    found = answer(*words)
    # The lower end of Wilson's interval of 57 in 60; the attacks of check 3 were not tried.
    assert exact(found, "check 4") == pytest.approx(0.8630, abs=1e-4)
    assert exact(found, "check 3") == 1.0
    files = found["detection"]["files"]
    assert [each["attack"] for each in files] == ["A16", "A15"]
    # r n (1 - d) / d, with n = 768 units at r = 0.001 tokens.
    assert int(files[0]["penalty_wei"]) == pytest.approx(0.768e18 * 0.1370 / 0.8630, rel=1e-3)
    assert found["detection"]["source"].endswith("redteam.json, 2026-01-02, commit unknown")
    figures(tmp_path, commit="abc123")
    assert "2026-01-02, commit abc123" in ask(*words).stdout


def test_this_checkouts_figures_are_the_default_with_their_commit(measured: str) -> None:
    found = answer("--recipe", DEMO, "--calibration", measured)
    assert "benchmarks/results/redteam.json, 20" in found["detection"]["source"]
    assert 0.9 < exact(found, "check 4") < 1
    assert "red team, whole files" in shown("--recipe", DEMO, "--calibration", measured)


def test_given_detection_replaces_what_was_measured(measured: str) -> None:
    found = answer("--recipe", DEMO, "--calibration", measured, "--detection", "0.5")
    assert {exact(found, check) for check in ("check 3", "check 4", "check 5")} == {0.5}
    assert found["detection"]["source"] == "50.0% for every exact check: --detection"


def test_without_figures_it_says_what_is_assumed(
    measured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "RESULTS", tmp_path / "none")
    found = read(ask("--recipe", DEMO, "--calibration", measured, "--json"))
    assert exact(found, "check 4") == 1.0
    assert "every exact check is assumed to find every cheat" in found["detection"]["source"]


@pytest.mark.parametrize(
    "changes",
    [
        {"detail": 5},
        {"detail": [{"attack": "A1"}]},
        {"date": None, "detail": None},
        {
            "detail": [
                {"attack": "A1", "title": "", "kind": "hard", "unit": "s", "trials": 1, "caught": 2}
            ]
        },
    ],
)
def test_what_the_red_team_did_not_write_is_refused(
    measured: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="does not hold the red team's figures"):
        ask(
            *("--recipe", DEMO, "--calibration", measured),
            *("--redteam", figures(tmp_path, **changes)),
        )


def test_nothing_to_judge_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither --run nor --recipe"):
        ask("--recipe", DEMO)


def test_a_run_without_its_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds only hashes"):
        ask("--run", "1")


def test_an_exact_fraud_that_costs_less_is_refused(measured: str) -> None:
    with pytest.raises(ConfigError, match="cannot cost less"):
        ask("--recipe", DEMO, "--calibration", measured, "--fraud-ppm", "600000")


def test_a_wrong_verdict_costs_a_signer_its_share_of_the_least_stake() -> None:
    assert bench_by(DeployParameters(), 2).signer_loss == 25 * 10**18
