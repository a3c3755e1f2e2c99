"""A11, A26 to A28, A32 and part of others: attacks whose subject is the contracts, played by forge.

The programs are Solidity: fuzz tests of `contracts/test/unit`, each of which fails unless its
attack fails. They stay there because a second copy in Python would be slower by a hundred times and
could differ. This module has what the runner and the page need: the tests of each attack, its gain,
and how a run of forge becomes trials: one per fuzz run, each with random parameters, with a new
fuzz seed for every 64 runs.
"""

import json
import subprocess
from functools import cache
from pathlib import Path
from random import Random

from muster.lab.redteam.gain import Gain
from muster.lab.redteam.stage import Stage
from muster.lab.redteam.trials import Attack, Outcome, PlayMany, Variant
from muster.protocol.errors import ConfigError

FORGE = Path("tools/forge")
TESTS = "contracts/test/unit/*"
TIMEOUT_S = 900
FEW_RUNS, MOST_RUNS = 5, 64
"""Fuzz runs of one test in one run of forge: in the fast slice, and the number that the tests
state. Only two numbers, so that all attacks share a run of forge.
"""
FUZZED = {
    "A8": (
        "submitDirect_reverts_whenTheSignatureIsMalformed",
        "executeFraud_reverts_whenTheSignatureIsMalformed",
        "claim_reverts_whenTheSlotWasPaidThroughAnotherBatch",
    ),
    "A9": (
        "submitDirect_reverts_whenTheSlotWasUsed",
        "claim_reverts_whenAllWasPaidBefore",
        "claim_paysASlotOnce_whenListedTwice",
    ),
    "A10": (
        "submitDirect_reverts_whenNotSignedByTheNode",
        "submitDirect_reverts_whenTheSubmissionWasChanged",
        "claim_reverts_whenNobodyHasTheNumber",
    ),
    "A11": (
        "join_reverts_whenConsentIsForAnotherWorker",
        "join_withPermit_works_whenItWasUsedBefore",
        "claim_reverts_whenAnythingAnnouncedDiffers",
        "revealVote_reverts_whenTheCommitmentWasCopied",
    ),
    "A13": ("join_activatesAfterTheDelay", "comeBack_fromLeaving_activatesAfterTheDelay"),
    "A26": ("settle_takesBonds_whenTheJuryUpholds", "overturnedFraud_isUndone"),
    "A27": (
        "withdraw_reverts_tooEarly",
        "withdraw_works_whileAnEscrowIsHeld",
        "executeFraud_reaches_whoLeftLater",
    ),
    "A28": (
        "submitDirect_reverts_aboveTheCap",
        "submitDirect_reverts_whenWorkInFlightFillsTheCap",
        "submitDirect_countsAllWork_untilTheLastIsFinal",
    ),
    "A29": (
        "rotateNode_reverts_whenConsentIsReplayed",
        "revealVote_reverts_whenTheCommitmentIsOfAnotherCase",
    ),
    "A32": (
        "draw_isFrozenWhenItsCaseOpens",
        "draw_ignoresStakeAboveTheRequirement",
        "draw_excludesWhoEverValidatedForTheRun",
        "draw_postpones_whenItsBlockIsTooOld",
    ),
}
"""The fuzz tests that play an attack, without `testFuzz_`."""


def play_tests(attack: str, *, most_profit: float | None = None) -> PlayMany:
    """Return a function that plays all fuzz tests of an attack.

    `most_profit` is the bound of the attackers' profit that the tests assert, if they measure it.
    """

    def outcome(name: str, succeeded: bool) -> Outcome:
        paid = most_profit if succeeded or most_profit is None else 1.0
        return Outcome(succeeded, "REVERTED" if succeeded else "PAID", name, profit=paid)

    def many(_stage: Stage, _random: Random, trials: int) -> list[Outcome]:
        made: list[Outcome] = []
        runs = FEW_RUNS if trials <= FEW_RUNS else MOST_RUNS
        for number in range(-(-trials // runs)):
            results = _forge(number, runs)
            for name in FUZZED[attack]:
                if name not in results:
                    raise ConfigError(f"no contract test is called testFuzz_{name}")
                succeeded, played = results[name]
                made += [outcome(name, succeeded)] * played
        return made

    return many


@cache
def _forge(number: int, runs: int) -> dict[str, tuple[bool, int]]:
    """Return the attacks' results and numbers of fuzz runs by test. All attacks share one run of
    forge; each `number` draws other parameters.
    """
    named = tuple(f"testFuzz_{name}" for names in FUZZED.values() for name in names)
    options = ("--fuzz-runs", str(runs), "--fuzz-seed", hex(1 + number))
    found = results_of(named, *options)
    return {name.removeprefix("testFuzz_"): result for name, result in found.items()}


def results_of(tests: tuple[str, ...], *options: str) -> dict[str, tuple[bool, int]]:
    """Return by name whether tests held, and how often each was played; `tests` are patterns."""
    if not FORGE.exists():
        raise ConfigError(
            f"attacks on contracts need forge, which is not at {FORGE}",
            hint="run make setup, then run this command in the project's folder",
        )
    command = [str(FORGE), "test", "--match-path", TESTS, "--match-test",
               f"^({'|'.join(tests)})\\(", *options, "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    try:
        suites = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(f"forge failed: {done.stderr.strip()[-500:]}") from None
    return {
        name.partition("(")[0]: (
            test["status"] == "Success",
            int(test["kind"]["Fuzz"]["runs"]) if "Fuzz" in test["kind"] else 1,
        )
        for suite in suites.values()
        for name, test in suite["test_results"].items()
    }


def on_chain(attack: str, *, most_profit: float | None = None) -> Variant:
    """Return the variant that plays an attack's fuzz tests."""
    return Variant(f"contracts: {attack}", many=play_tests(attack, most_profit=most_profit))


ATTACKS = (
    Attack(
        "A11",
        "pending transactions seen and overtaken",
        "what is signed names who is paid; consents name who may use them; votes are committed "
        "first",
        "hard",
        (on_chain("A11"),),
        Gain(saved=1.0),
        time_unit="transaction",
    ),
    Attack(
        "A26",
        "honest work accused for the proceeds",
        "nobody earns by what a run's validators found; a wrong claim loses its bond",
        "economic",
        # The tests compare the wealth of accuser and accused before and after.
        (on_chain("A26", most_profit=0.0),),
        time_unit="case",
    ),
    Attack(
        "A27",
        "stake withdrawn before the verdict, or held hostage",
        "unbonding outlasts judgement; slashes reach unbonding stake; nothing holds it longer",
        "hard",
        (on_chain("A27"),),
        Gain(saved=1.0),
        time_unit="withdrawal",
    ),
    Attack(
        "A28",
        "more work in flight than stake covers",
        "tickets are bound by stake in the run, and so are direct submissions",
        "hard",
        (on_chain("A28"),),
        Gain(saved=1.0),
        time_unit="submission",
    ),
    Attack(
        "A32",
        "a jury ground by deposits, a draw awaited until it suits",
        "a place counts once, whatever its stake; bench and draw block are fixed when the case "
        "opens",
        "hard",
        (on_chain("A32"),),
        Gain(saved=0.0),
        time_unit="case",
    ),
)
