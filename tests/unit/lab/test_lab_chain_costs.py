"""`muster economics --chain`: counts, fees and totals of a run, and refusals."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from muster.lab.economics import chain_costs
from muster.lab.economics.chain_costs import Assumptions, kinds_of, read_measured
from muster.lab.economics.chain_fees import ChainKind
from muster.lab.economics.command import economics
from muster.protocol.errors import ConfigError

BASE = ("--chain", "base", "--fee", "gas_price=0.005", "--fee", "base_fee=1")
OWN = ("--chain", "own", "--fee", "gas_price=1")
RUN = Assumptions(
    steps=10, submissions_per_step=3, refill_submissions=1, rollouts_per_submission=16
)


def ask(*words: str) -> Result:
    return CliRunner().invoke(economics, words, catch_exceptions=False)


def answer(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(*words, "--json").stdout)
    return found


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of `make bench-gas` if every operation cost the same."""
    sizes = {"gas": 1000, "zero_bytes": 3, "nonzero_bytes": 7, "fastlz_bytes": 100}
    row = {**sizes, "brotli_bytes": 50, "goal": None}
    detail: dict[str, Any] = {kind.operation: row for kind in kinds_of(RUN)}
    path = tmp_path / "gas.json"
    path.write_text(json.dumps({"date": "2026-01-02", "detail": detail}))
    monkeypatch.setattr(chain_costs, "RESULTS", path)
    return path


def test_a_runs_transactions_follow_from_its_assumptions() -> None:
    counts = {kind.operation: kind.count for kind in kinds_of(replace(RUN, direct=1))}
    assert (RUN.submissions, RUN.rollouts) == (40, 640)
    assert counts == {
        "create_run": 1,
        "approve": 1 + 5 + 10 + 1,
        "fund": 1,
        "take_seat": 5,
        "onboard": 100,
        "publish_checkpoint": 11,
        "commit_batch": 40,
        "post_outcomes_1": 40,
        "submit_direct": 1,
        "return_bond": 1,
        "claim_16_batches": 3,
        "execute_fraud": 10,
        "finalise_fraud": 10,
        "announce": 10,
        "claim_case": 10,
        "draw": 10,
        "commit_vote": 30,
        "reveal_vote": 30,
        "settle_case": 10,
        "collect_fee": 30,
        "request_unbond": 105,
        "withdraw": 105,
    }
    assert replace(RUN, submissions_per_batch=16).batches == 3


def test_the_default_is_a_run_of_intellect_2s_size() -> None:
    found = answer(*OWN)
    # 350 steps of 16 submissions, and as many again for the filter, of 16 x 16 samples.
    assert found["rollouts"] == 350 * 32 * 256
    assert answer(*OWN, "--recipe", "demo", "--assume", "steps=2")["recipe"] == "demo: sort digits"


def test_every_transaction_that_was_measured_is_in_the_committed_results() -> None:
    measured = read_measured(chain_costs.RESULTS)
    for size in (1, 16, 64, 256):
        for kind in kinds_of(replace(RUN, submissions_per_batch=size)):
            assert measured.of(kind.operation).gas > 21_000
    assert "benchmarks/results/gas.json, 20" in measured.source


@pytest.mark.usefixtures("results")
def test_totals_are_counts_times_the_chains_rule() -> None:
    found = answer("--chain", "arbitrum", "--fee", "gas_price=2", "--fee", "data_price=0.5")
    sent = sum(row["count"] for row in found["transactions"])
    assert found["gas"] == sent * 1000
    # Gas at 2 gwei, and 16 units for each of 50 bytes at half a gwei.
    assert int(found["wei"]) == sent * (2000 + 400) * 10**9
    assert int(found["wei_at_times"]) == 10 * int(found["wei"])
    assert {row["count"] for row in found["transactions"]} >= {1, 5, 100, 351}


@pytest.mark.usefixtures("results")
def test_on_base_the_scalars_are_assumptions_too() -> None:
    # 836,500 x 100 - 42,585,600 is below the least size of 100 bytes.
    words = (*BASE, "--fee", "blob_fee=0", "--assume", "base_fee_scalar=1000000")
    row = answer(*words)["transactions"][0]
    assert (row["execution_wei"], row["data_wei"]) == ("5000000000", "1600000000000")
    dearer = answer(*words, "--assume", "operator_fee_constant=7")["transactions"][0]
    assert dearer["execution_wei"] == "5000000007"


@pytest.mark.usefixtures("results")
def test_everything_assumed_is_printed_with_its_source() -> None:
    shown = ask(*BASE, "--fee", "blob_fee=0.1", "--assume", "workers=7").stdout
    assert "gas_price 0.005 gwei, base_fee 1 gwei, blob_fee 0.1 gwei: as given" in shown
    assert "pull request 188" in shown
    assert "workers 7, validators 5" in shown
    assert "gas.json, 2026-01-02, commit unknown" in shown
    assert "10 x fees" in shown
    assert "a rollout" in shown
    changed = ask(*BASE, "--fee", "blob_fee=0.1", "--assume", "base_fee_scalar=1").stdout
    assert "pull request 188" not in changed


@pytest.mark.usefixtures("results")
def test_amounts_are_in_dollars_when_the_coin_has_a_price() -> None:
    words = (*OWN, "--recipe", "demo", "--assume", "steps=1", "--assume", "workers=0")
    [line] = [x for x in ask(*words).stdout.splitlines() if x.startswith("create the run")]
    assert line.split()[-4:] == ["1e-06", "0", "1e-06", "1e-05"]
    dear = ask(*words, "--assume", "coin_usd=2000", "--assume", "times=3").stdout
    [line] = [x for x in dear.splitlines() if x.startswith("create the run")]
    assert line.split()[-4:] == ["$0.002", "$0", "$0.002", "$0.006"]
    assert "3 x fees" in dear
    dearer = ask(*words, "--assume", "coin_usd=2000000000").stdout
    assert "$2,000.00" in dearer


def test_the_commands_of_the_documentation_answer() -> None:
    page = (Path(__file__).parents[3] / "docs" / "economics.md").read_text()
    lines = re.findall(r"^muster economics (--chain .*)$", page, re.M)
    assert {line.split()[1] for line in lines} == set(ChainKind)
    for line in lines:
        assert ask(*shlex.split(line)).exit_code == 0


def test_the_documentations_figures_are_the_committed_ones() -> None:
    page = (Path(__file__).parents[3] / "docs" / "economics.md").read_text()
    for size in (1, 16):
        found = answer(*OWN, "--assume", f"submissions_per_batch={size}")
        gas = f"{found['gas'] / 10**6:,.0f} million"
        assert f"| {size} | {gas} | {found['gas'] / found['rollouts']:.0f} |" in page


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (
            ("--chain", "base", "--fee", "gas_price=1"),
            "the base_fee of base is missing",
            "l1BaseFee",
        ),
        (("--chain", "arbitrum", "--fee", "gas_price=1"), "data_price of arbitrum", "ArbGasInfo"),
        ((*OWN, "--fee", "blob_fee=1"), "own has no fee 'blob_fee'", "give only gas_price"),
        ((*OWN, "--fee", "gasprice=1"), "does not know 'gasprice'", "did you mean gas_price?"),
        ((*OWN, "--fee", "gas_price=dear"), "gas_price is not a number: 'dear'", "gas_price=10"),
        ((*OWN, "--fee", "gas_price=-1"), "gas_price is not a number: '-1'", "gas_price=10"),
        ((*OWN, "--fee", "gas_price=nan"), "gas_price is not a number: 'nan'", "gas_price=10"),
        ((*OWN, "--assume", "worker=1"), "does not know 'worker'", "did you mean workers?"),
        ((*OWN, "--assume", "workers=1.5"), "not a whole number: 1.5", "--assume workers=10"),
        ((*OWN, "--assume", "steps=0"), "has no rollouts", "steps=350"),
        ((*OWN, "--assume", "submissions_per_batch=0"), "no batches", "steps=350"),
        (
            (*OWN, "--assume", "submissions_per_batch=2"),
            "post_outcomes_2 was not",
            "1, 16, 64, 256",
        ),
        ((*OWN, "--run", "1"), "what cheating is worth", "leave out --chain"),
        (("--fee", "gas_price=1"), "need a chain", "--chain"),
    ],
)
def test_what_cannot_be_answered_is_refused(words: tuple[str, ...], says: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        ask(*words)
    assert hint in str(error.value.hint)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gas", None), ("gas", "much"), ("gas", -1), ("brotli_bytes", -1), ("fastlz_bytes", [])],
)
def test_what_the_benchmark_did_not_write_is_refused(
    results: Path, name: str, value: object
) -> None:
    document = json.loads(results.read_text())
    for row in document["detail"].values():
        row[name] = value
    results.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="does not hold the measured costs of transactions"):
        ask(*OWN)


def test_results_without_sizes_are_refused(results: Path) -> None:
    results.write_text(json.dumps({"date": "2026-01-02", "detail": {"fund": {"gas": 1}}}))
    with pytest.raises(ConfigError, match="no sizes of transactions"):
        ask(*OWN)
    results.unlink()
    with pytest.raises(ConfigError, match="does not hold the measured costs"):
        ask(*OWN)
