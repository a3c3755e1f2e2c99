"""The economics of a run: its parameters and measured checks as the terms cheating is judged by.

Gathers what `muster.protocol.economics` computes with from a recipe, a calibration, the run's terms
and the deployment, and refuses a run whose parameters make cheating pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.chain import Chain, RunTerms
from muster.deploy import DeployParameters
from muster.protocol import economics
from muster.protocol.economics import Cheat, Terms
from muster.protocol.errors import ConfigError
from muster.protocol.intervals import wilson
from muster.protocol.judges import Bench
from muster.protocol.recipe import Recipe
from muster.toploc import Calibration

TOKEN = 10**18
"""Wei of one token."""
EXACT = (
    Cheat("other problems, prompts or seeds (check 3)", 1.0, exact=True),
    Cheat("rewards or units made up (check 4)", 1.0, exact=True),
    Cheat("cut short or run on (check 5)", 1.0, exact=True),
)
"""Cheats that recomputation finds whenever a submission is checked at all."""
SAVINGS = {"nothing": 1.0, "cheap": 1.0, "other": 0.0}
"""What a kind of cheat is taken to save of a unit's price. Forgers and much cheaper models get the
worst case; what is neither ("other": the policy before, weights in int8) costs about as much as the
policy itself, so that the table says from which saving on it would pay instead."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a deployment fixes for all of its runs."""

    required_stake: int
    """Active stake that a worker must hold."""
    stake_per_unit: int
    """Stake behind one unit in flight."""
    validator_stake: int
    """Active stake that a validator must hold."""
    wrong_verdict_ppm: int
    """Millionths of a signer's stake that an overturned verdict costs."""
    bond: int
    """What a claimant puts up."""
    reporter_ppm: int
    """Reporter's share of a slash."""
    reporter_cap: int
    """The most a reporter gets."""
    jury_size: int
    """Jurors of a case."""
    juror_stake: int
    """Active stake that a juror of the network must hold."""
    juror_fee: int
    """What a juror of the prevailing ruling earns at most."""
    absence_ppm: int
    """Millionths of a juror's stake that a vote costs which it did not cast."""


def fixed_by(parameters: DeployParameters) -> Fixed:
    """Return what a deployment with these parameters would fix."""
    return Fixed(
        required_stake=parameters.required_worker_stake,
        stake_per_unit=parameters.stake_per_unit,
        validator_stake=parameters.required_validator_stake,
        wrong_verdict_ppm=parameters.wrong_verdict_ppm,
        bond=parameters.bond,
        reporter_ppm=parameters.reporter_ppm,
        reporter_cap=parameters.reporter_cap,
        jury_size=parameters.jury_size,
        juror_stake=parameters.required_juror_stake,
        juror_fee=parameters.juror_fee,
        absence_ppm=parameters.absence_ppm,
    )


async def read_fixed(chain: Chain) -> Fixed:
    """Return what the contracts were deployed with."""
    court = await chain.court.terms()
    return Fixed(
        required_stake=await chain.workers.required_stake(),
        stake_per_unit=await chain.ledger.stake_per_unit(),
        validator_stake=await chain.runs.required_validator_stake(),
        wrong_verdict_ppm=court.wrong_verdict_ppm,
        bond=court.bond,
        reporter_ppm=await chain.vault.reporter_ppm(),
        reporter_cap=await chain.vault.reporter_cap(),
        jury_size=court.jury_size,
        juror_stake=await chain.jurors.required_stake(),
        juror_fee=court.juror_fee,
        absence_ppm=court.absence_ppm,
    )


def terms_of(recipe: Recipe, calibration: Calibration, run: RunTerms, fixed: Fixed) -> Terms:
    """Return a run's terms as the economics sees them: every submission and sample is checked."""
    honest = [row for row in calibration.measured if row.kind == "honest"]
    trials = sum(row.trials for row in honest)
    failed = trials - sum(row.accepted for row in honest)
    return Terms(
        price_wei=run.price_per_unit,
        fraud_ppm=run.fraud_ppm,
        exact_fraud_ppm=run.exact_fraud_ppm,
        fraud_strikes=calibration.fraud_strikes,
        samples=recipe.sampling.problems_per_submission * recipe.sampling.samples_per_problem,
        units_per_sample=recipe.sampling.max_new_tokens,
        required_stake=fixed.required_stake,
        stake_per_unit=fixed.stake_per_unit,
        false_positive=failed / trials if trials else 0.0,
    )


def bench_of(run: RunTerms, fixed: Fixed) -> Bench:
    """Return who judges a run, each validator with the least stake it may have."""
    return Bench(
        quorum=run.quorum,
        validator_stake=fixed.validator_stake,
        wrong_verdict_ppm=fixed.wrong_verdict_ppm,
        bond=fixed.bond,
        reporter_ppm=fixed.reporter_ppm,
        reporter_cap=fixed.reporter_cap,
        jury_size=fixed.jury_size,
        juror_stake=fixed.juror_stake,
        juror_fee=fixed.juror_fee,
        absence_ppm=fixed.absence_ppm,
    )


def cheats_of(calibration: Calibration) -> list[Cheat]:
    """Return the ways to cheat that a calibration measured, and those that exact checks find.

    The power of each is the lower end of its 95 % interval (Wilson), so that few trials count for
    little.
    """
    measured = [
        Cheat(row.name, wilson(row.trials - row.accepted, row.trials)[0], saving=SAVINGS[row.kind])
        for row in calibration.measured
        if row.kind != "honest"
    ]
    return [*EXACT, *measured]


def refuse_unsafe(terms: Terms, cheats: Sequence[Cheat]) -> None:
    """Raise ConfigError when cheating pays for a worker with the least stake that brings work.

    The message says which cheat, what it brings and what would change that.
    """
    if not economics.pays(terms, cheats):
        return
    stake = terms.least_stake
    found = [economics.assess(terms, cheat, stake) for cheat in cheats]
    worst = max(found, key=lambda f: max(f.profit_wei, f.burst_wei))
    raise ConfigError(
        f"cheating pays in such a run: {worst.cheat.name!r}, noticed in {worst.cheat.power:.1%} of "
        f"samples, brings {worst.profit_wei / TOKEN:,.6g} tokens per submission over honest work, "
        f"and {worst.burst_wei / TOKEN:,.6g} before the first of them is judged, to a worker with "
        f"{stake / TOKEN:,.6g} tokens at stake",
        hint=f"{_mended(terms, cheats)}; `muster economics` shows all of it, "
        "--accept-unsafe-economics creates the run as it is",
    )


def _mended(terms: Terms, cheats: Sequence[Cheat]) -> str:
    """Return the single changes that would do, in words."""
    found = economics.remedies(terms, cheats)
    ways = [
        (found.fraud_ppm, "--fraud-ppm and --exact-fraud-ppm of at least {:,}"),
        (found.price_wei, "a --price of at most {:,}"),
        (found.required_stake, "contracts that require a worker's stake of at least {:,} wei"),
    ]
    worded = [words.format(value) for value, words in ways if value is not None]
    if not worded:
        return "no slash, stake or price mends that: measure limits that notice it"
    return "any one of: " + "; ".join(worded)
