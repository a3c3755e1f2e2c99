"""The sums over trials, and the verdict about a broken defence."""

import io
import json
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from muster.lab.redteam.command import redteam
from muster.lab.redteam.gain import Gain, Terms
from muster.lab.redteam.runner import failures, read_trials, run, shares
from muster.lab.redteam.stage import Stage, Worker
from muster.lab.redteam.trials import Attack, Outcome, Trial, Variant, conclude
from muster.protocol import economics
from muster.protocol.errors import ConfigError
from muster.protocol.messages import Reason

TERMS = Terms(price_wei=10, stake_wei=1000, fraud_ppm=500_000, units=5)


def attack(kind: str = "hard", **variants: float) -> Attack:
    made = tuple(Variant(name, None, level) for name, level in variants.items())
    return Attack("A1", "a cheat", "a check", kind, made)  # type: ignore[arg-type]


def trials(variant: str, caught: int, missed: int = 0, **found: object) -> list[Trial]:
    outcomes = [Outcome(True, "FRAUD", "X", **found)] * caught  # type: ignore[arg-type]
    outcomes += [Outcome(False, "ACCEPTED", "", **found)] * missed  # type: ignore[arg-type]
    return [Trial("A1", variant, i, outcome, 0.0) for i, outcome in enumerate(outcomes)]


def test_profit_is_saving_less_what_is_lost_when_found() -> None:
    # s c - q (r + L) with L = 1000 * 0.5 / (10 * 5) = 10.
    assert TERMS.slash == 10
    assert TERMS.profit(Gain(saved=0.75), 0.5, is_fraud=True) == pytest.approx(0.75 - 0.5 * 11)
    assert TERMS.profit(Gain(saved=0.75), 0.5, is_fraud=False) == pytest.approx(0.25)
    assert TERMS.profit(Gain(saved=0, extra=1), 1.0, is_fraud=False) == pytest.approx(-1)


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_profit_is_that_of_the_economics_for_a_whole_submission(power: float) -> None:
    terms = economics.WorkerTerms(
        price_wei=10, fraud_ppm=500_000, exact_fraud_ppm=500_000, fraud_strikes=1, samples=1,
        units_per_sample=5, required_stake=1000, stake_per_unit=1,
    )  # fmt: skip
    cheat = economics.Cheat("forged", power, exact=True, saving=0.75)
    odds = economics.odds_of(terms, cheat, 1)
    per_unit = economics.profit(terms, cheat, 1000, odds) / (10 * 5)
    assert TERMS.profit(Gain(saved=0.75), power, is_fraud=True) == pytest.approx(per_unit)


def test_one_escape_breaks_a_hard_defence() -> None:
    assert conclude(attack(a=1), trials("a", 300), TERMS).failure == ""
    assert (
        conclude(attack(a=1), trials("a", 299, 1), TERMS).failure
        == "a: 299 of 300 caught (ACCEPTED)"
    )


@pytest.mark.parametrize(("caught", "holds"), [(95, True), (94, False)])
def test_a_statistical_defence_finds_95_of_100(caught: int, holds: bool) -> None:
    result = conclude(attack("statistical", a=1), trials("a", caught, 100 - caught), TERMS)
    assert (result.failure == "") is holds


@pytest.mark.parametrize(("profit", "holds"), [(-0.1, True), (0.02, False)])
def test_an_economic_attack_must_not_pay(profit: float, holds: bool) -> None:
    made = trials("a", 0, 50, profit=profit)
    assert (conclude(attack("economic", a=1), made, TERMS).failure == "") is holds


def test_what_has_no_profit_to_measure_must_be_refused() -> None:
    both = attack("economic", a=1, b=2)
    made = trials("a", 0, 50, profit=-1.0)
    assert conclude(both, made + trials("b", 5), TERMS).failure == ""
    assert "b: 4 of 5" in conclude(both, made + trials("b", 4, 1), TERMS).failure


def test_profits_have_an_interval() -> None:
    made = trials("a", 0, 50, profit=-1.0) + trials("a", 0, 50, profit=0.0)
    result = conclude(attack("economic", a=1), made, TERMS)
    # 1.96 * 0.5025 / 10
    assert result.profit_interval == pytest.approx((-0.5985, -0.4015), abs=1e-4)
    assert (result.profit, result.measured) == (-0.5, 100)


def test_what_takes_seconds_gets_a_tenth() -> None:
    plan = Attack("A1", "", "", "hard", (Variant("a", None), Variant("slow", None, most=3)))
    assert [n for _, n in shares(plan, 5)] == [5, 1]
    assert [n for _, n in shares(plan, 20)] == [20, 2]
    assert [n for _, n in shares(plan, 300)] == [300, 3]


def test_harmless_trials_count_for_nothing() -> None:
    made = trials("a", 10) + trials("a", 0, 90, is_harmless=True)
    result = conclude(attack(a=1), made, TERMS)
    assert (result.trials, result.caught, result.failure) == (10, 10, "")
    assert conclude(attack(a=1), trials("a", 0, 9, is_harmless=True), TERMS).failure


def test_an_honest_twin_that_is_noticed_breaks_the_suite() -> None:
    twin = Variant("honest", None, must_pass=True)
    plan = Attack("A1", "", "", "hard", (Variant("a", None), twin))
    passed = trials("a", 9) + trials("honest", 0, 9, is_harmless=True)
    assert conclude(plan, passed, TERMS).failure == ""
    assert "honest work" in conclude(plan, passed + trials("honest", 1), TERMS).failure


def test_trials_are_shared_among_ways() -> None:
    assert [n for _, n in shares(attack(a=1, b=2), 5)] == [3, 3]
    assert [n for _, n in shares(attack("statistical", a=1, b=2), 5)] == [5, 5]


def test_honest_work_passes_on_the_stage(stage: Stage) -> None:
    random = Random(1)
    for _ in range(3):
        assert stage.judge(Worker(stage, random).deliver(stage.ticket(random))) is None


def test_a_missing_defence_is_noticed(stage: Stage) -> None:
    """The suite must fail without the check, or its success would prove nothing."""

    def unchecked(stage: Stage, random: Random) -> Outcome:
        delivery = Worker(stage, random).deliver(stage.ticket(random))
        return stage.outcome(delivery, Reason.WRONG_REWARD)

    results = run(stage, [Attack("A16", "", "", "hard", (Variant("unchecked", unchecked),))])
    assert failures(results) == ["A16: unchecked: 0 of 5 caught (ACCEPTED)"]


def test_a_record_is_read_back_and_gone_on_with(stage: Stage, tmp_path: Path) -> None:
    from muster.lab.redteam.catalogue import ATTACKS

    record = tmp_path / "trials.jsonl"
    chosen = [ATTACKS["A39"]]
    with record.open("w") as lines:
        (first,) = run(stage, chosen, trials=4, record=lines)
    earlier = read_trials(record)
    again = io.StringIO()
    (second,) = run(stage, chosen, trials=6, earlier=earlier, record=again)
    assert (first.trials, second.trials) == (4, 6)
    assert len(again.getvalue().splitlines()) == 2
    assert {json.loads(line)["number"] for line in again.getvalue().splitlines()} == {2}


def test_the_same_seed_draws_the_same_trials(stage: Stage) -> None:
    from muster.lab.redteam.catalogue import ATTACKS

    def lines(seed: int) -> list[dict[str, object]]:
        out = io.StringIO()
        run(stage, [ATTACKS["A2"]], trials=1, seed=seed, record=out)
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        return [{k: v for k, v in row.items() if k != "cpu_s"} for row in rows]

    assert lines(1) == lines(1)


def test_command_lists_and_refuses_what_it_does_not_know() -> None:
    listed = CliRunner().invoke(redteam, ["--list"])
    assert listed.exit_code == 0
    assert "A40" in listed.output
    unknown = CliRunner().invoke(redteam, ["--attack", "A99"])
    assert unknown.exit_code == 2
    assert "no attack 'A99'" in unknown.output


def test_command_fails_when_a_defence_does(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    import contextlib

    from muster.lab.redteam import command

    broken = Attack("A1", "t", "d", "hard", (Variant("a", lambda _s, _r: Outcome(False)),))
    monkeypatch.setattr(command, "_chosen", lambda _names: [broken])
    monkeypatch.setattr(command, "_stage", lambda _folder: contextlib.nullcontext(stage))
    result = CliRunner().invoke(redteam, [])
    assert isinstance(result.exception, ConfigError)
    assert "A1: a: 0 of 5 caught" in str(result.exception)
