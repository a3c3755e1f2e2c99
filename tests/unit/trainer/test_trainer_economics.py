"""A run's parameters from a cheat's view, and the refusal of profitable ones."""

import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from worlds.client_world import CALIBRATION

from muster.chain import RunTerms
from muster.deploy import DeployParameters
from muster.protocol import economics
from muster.protocol.errors import ConfigError
from muster.protocol.intervals import wilson
from muster.protocol.recipe import Recipe
from muster.toploc import Calibration
from muster.toploc.calibration import MeasuredKind, Measurement
from muster.trainer.config import load_recipe
from muster.trainer.economics import cheats_of, fixed_by, refuse_unsafe, terms_of

TOKEN = 10**18
CONFIGS = Path(__file__).parents[3] / "configs"
RUN = RunTerms(TOKEN // 1000, 100_000, 500_000, 2)
FIXED = fixed_by(DeployParameters())


def row(name: str, kind: MeasuredKind, trials: int, accepted: int) -> Measurement:
    return Measurement(name=name, kind=kind, judged="sample", trials=trials, accepted=accepted)


def calibration(*measured: Measurement) -> Calibration:
    return CALIBRATION.model_copy(update={"fraud_strikes": 5, "measured": measured})


MEASURED = calibration(
    row("honest", "honest", 1000, 1000),
    row("constant", "nothing", 595, 0),
    row("int4", "cheap", 320, 241),
    row("int8", "other", 320, 320),
)


def with_samples(problems: int, samples: int) -> Recipe:
    recipe = load_recipe(CONFIGS / "demo.toml")
    sampling = recipe.sampling.model_copy(
        update={"problems_per_submission": problems, "samples_per_problem": samples}
    )
    return recipe.model_copy(update={"sampling": sampling})


def test_powers_are_the_lower_ends_of_what_was_measured() -> None:
    found = {cheat.name: cheat for cheat in cheats_of(MEASURED)}
    assert found["constant"].power == wilson(595, 595)[0]
    assert found["int4"].power == wilson(79, 320)[0]
    assert (found["int8"].power, found["int8"].saving) == (0.0, 0.0)
    assert "honest" not in found
    assert all(cheat.power == 1 for cheat in found.values() if cheat.exact)


def test_terms_are_the_runs_the_recipes_and_the_deployments() -> None:
    terms = terms_of(load_recipe(CONFIGS / "demo.toml"), MEASURED, RUN, FIXED)
    assert (terms.samples, terms.units_per_sample, terms.units) == (128, 6, 768)
    assert (terms.fraud_strikes, terms.false_positive) == (5, 0.0)
    assert terms.least_stake == 100 * TOKEN


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_no_cheat_that_is_noticed_pays_under_a_preset(name: str) -> None:
    terms = terms_of(load_recipe(CONFIGS / name), MEASURED, RUN, FIXED)
    refuse_unsafe(terms, cheats_of(MEASURED))
    assert not economics.pays(terms, cheats_of(MEASURED))


def test_a_run_whose_files_are_too_small_for_its_checks_is_refused() -> None:
    # One problem of two samples, a quarter of which is noticed: nothing is at risk.
    terms = terms_of(with_samples(1, 2), MEASURED, RUN, FIXED)
    with pytest.raises(ConfigError, match=r"cheating pays.*'int4', noticed in 20\..% of") as caught:
        refuse_unsafe(terms, cheats_of(MEASURED))
    assert "no slash, stake or price stops this" in (caught.value.hint or "")
    assert "--accept-unsafe-economics" in (caught.value.hint or "")


def test_limits_that_fail_honest_work_invite_whoever_risks_a_small_stake() -> None:
    # One honest sample in a thousand fails, so one honest file of 128 in eight is not paid.
    strict = calibration(row("honest", "honest", 1000, 999), *MEASURED.measured[1:])
    terms = terms_of(load_recipe(CONFIGS / "demo.toml"), strict, RUN, FIXED)
    assert terms.false_positive == pytest.approx(0.001)
    with pytest.raises(ConfigError, match="before the first of them is judged"):
        refuse_unsafe(terms, cheats_of(strict))


def test_a_refusal_names_changes_that_are_enough() -> None:
    sparse = replace(
        terms_of(with_samples(1, 2), MEASURED, RUN, FIXED),
        audit_rate=0.01,
        fraud_strikes=1,
        stake_per_unit=TOKEN,
        required_stake=TOKEN,
        price_wei=TOKEN,
    )
    forged = [cheat for cheat in cheats_of(MEASURED) if cheat.name == "constant"]
    with pytest.raises(ConfigError) as caught:
        refuse_unsafe(sparse, forged)
    found = economics.remedies(sparse, forged)
    assert found.price_wei is not None
    said = re.search(r"a --price of at most (0\.\d+) tokens", caught.value.hint or "")
    assert said is not None
    assert Decimal(said[1]) * TOKEN == found.price_wei
    refuse_unsafe(replace(sparse, price_wei=found.price_wei), forged)
