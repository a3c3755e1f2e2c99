"""The economics of a run: its parameters and measured checks decide whether cheating pays.

Collects the inputs of `muster.protocol.economics` from a recipe, a calibration, the run's terms and
the deployment, and refuses a run whose parameters make cheating pay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from muster.chain import Chain, RunTerms
from muster.deploy import DeployParameters
from muster.protocol import economics
from muster.protocol.economics import Cheat, WorkerTerms
from muster.protocol.errors import ConfigError
from muster.protocol.intervals import wilson
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
"""Assumed saving of a kind of cheat, as a share of a unit's price. Forgers and much cheaper models
get the worst case. Other cheats (an earlier policy, int8 weights) cost about as much as the policy
itself, so for them the table says which saving would make them pay."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Terms that a deployment fixes for the workers of all its runs."""

    required_stake: int
    """Active stake that a worker must hold."""
    stake_per_unit: int
    """Stake behind one unit in flight."""


def fixed_by(parameters: DeployParameters) -> Fixed:
    """Return the terms of a deployment with these parameters."""
    return Fixed(parameters.required_worker_stake, parameters.stake_per_unit)


async def read_fixed(chain: Chain) -> Fixed:
    """Return the terms that the contracts were deployed with."""
    return Fixed(await chain.workers.required_stake(), await chain.ledger.stake_per_unit())


def terms_of(recipe: Recipe, calibration: Calibration, run: RunTerms, fixed: Fixed) -> WorkerTerms:
    """Return a run's terms for the economics, which assumes that every submission and sample is
    checked."""
    honest = [row for row in calibration.measured if row.kind == "honest"]
    trials = sum(row.trials for row in honest)
    failed = trials - sum(row.accepted for row in honest)
    return WorkerTerms(
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


def refuse_unsafe(terms: WorkerTerms, cheats: Sequence[Cheat]) -> None:
    """Raise ConfigError when cheating pays for a worker with the least stake that brings work.

    The message names the cheat, its gain and the changes that would prevent it.
    """
    if not economics.pays(terms, cheats):
        return
    stake = terms.least_stake
    found = []
    for cheat in cheats:
        gained = economics.best_share(terms, cheat, stake)[1]
        together = economics.burst(terms, cheat, stake, stake // terms.stake_per_unit)
        found.append((gained, together, cheat))
    gained, together, worst = max(found, key=lambda each: max(each[:2]))
    raise ConfigError(
        f"cheating pays in such a run: {worst.name!r}, noticed in {worst.power:.1%} of "
        f"samples, brings {gained / TOKEN:,.6g} tokens per submission over honest work, "
        f"and {together / TOKEN:,.6g} before the first of them is judged, to a worker with "
        f"{stake / TOKEN:,.6g} tokens at stake",
        hint=f"{_mended(terms, cheats)}; `muster economics` shows all of it, "
        "--accept-unsafe-economics creates the run as it is",
    )


def _mended(terms: WorkerTerms, cheats: Sequence[Cheat]) -> str:
    """Return in words the changes of which each alone makes cheating unprofitable."""
    found = economics.remedies(terms, cheats)
    price = None if found.price_wei is None else Decimal(found.price_wei) / TOKEN
    ways = [
        (found.fraud_ppm, "--fraud-ppm and --exact-fraud-ppm of at least {:,}"),
        (price, "a --price of at most {:f} tokens"),
        (found.required_stake, "contracts that require a worker's stake of at least {:,} wei"),
    ]
    worded = [words.format(value) for value, words in ways if value is not None]
    if not worded:
        return "no slash, stake or price stops this: calibrate limits that detect it"
    return "any one of: " + "; ".join(worded)
