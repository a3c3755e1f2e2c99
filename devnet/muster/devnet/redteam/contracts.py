"""A11, A26 to A28, A32 and part of others: attacks whose subject is the contracts, played by forge.

The programs are Solidity: the fuzz tests of `contracts/test/unit/Attacks*`, each of
which fails unless its attack fails. They stay there because a second copy in Python would be
slower by a hundred times and could differ. Here is what the runner and the page need of them: which
tests an attack has, what it would bring, and how a run of forge becomes trials: one per fuzz run,
each with random parameters, other ones for every 64 runs.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from random import Random

from muster.devnet.redteam.gain import Gain
from muster.devnet.redteam.stage import Stage
from muster.devnet.redteam.trials import Attack, Outcome, PlayMany, Variant
from muster.protocol.errors import ConfigError

FORGE = Path("tools/forge")
TESTS = "contracts/test/unit/Attacks*"
TIMEOUT_S = 900
FEW_RUNS, MOST_RUNS = 5, 64
"""Of one fuzz test in one run of forge: in the fast slice, and what the tests themselves state. Two
numbers only, so that all attacks share a run.
"""


def play_tests(prefix: str, *, most_profit: float | None = None) -> PlayMany:
    """Return what plays all fuzz tests whose names go on with `prefix` after `testFuzz_attack_`.

    `most_profit` is what the tests assert of the attackers' wealth, if that is what they measure.
    """

    def outcome(name: str, succeeded: bool) -> Outcome:
        paid = most_profit if succeeded or most_profit is None else 1.0
        return Outcome(succeeded, "REVERTED" if succeeded else "PAID", name, profit=paid)

    def many(_stage: Stage, _random: Random, trials: int) -> list[Outcome]:
        made: list[Outcome] = []
        runs = FEW_RUNS if trials <= FEW_RUNS else MOST_RUNS
        for number in range(-(-trials // runs)):
            results = _forge(number, runs)
            chosen = {name: found for name, found in results.items() if prefix in name}
            if not chosen:
                raise ConfigError(f"no contract test is called testFuzz_attack_{prefix}…")
            for name, (succeeded, played) in sorted(chosen.items()):
                made += [outcome(name, succeeded)] * played
        return made

    return many


@cache
def _forge(number: int, runs: int) -> dict[str, tuple[bool, int]]:
    """Return the attacks' results and numbers of runs by test, of one run of forge: all attacks
    share it, each run of a number draws other parameters.
    """
    if not FORGE.exists():
        raise ConfigError(
            "the contracts' attacks are played by forge, which is not here",
            hint="run it in the project's folder, after make setup",
        )
    command = [str(FORGE), "test", "--match-path", TESTS, "--match-test", "testFuzz_attack_",
               "--fuzz-runs", str(runs), "--fuzz-seed", hex(1 + number), "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    try:
        suites = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(f"forge failed: {done.stderr.strip()[-500:]}") from None
    return {
        name.partition("(")[0].removeprefix("testFuzz_attack_"): (
            test["status"] == "Success",
            int(test["kind"]["Fuzz"]["runs"]),
        )
        for suite in suites.values()
        for name, test in suite["test_results"].items()
    }


def on_chain(prefix: str, *, most_profit: float | None = None) -> Variant:
    """Return the variant that plays an attack's fuzz tests."""
    return Variant(f"contracts: {prefix}", many=play_tests(prefix, most_profit=most_profit))


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
        "judges get nothing of a slash; an accuser's bond is burned when it loses",
        "economic",
        # The test compares all that judges and accuser have before and after.
        (on_chain("A26", most_profit=0.0),),
        time_unit="case",
    ),
    Attack(
        "A27",
        "stake withdrawn before the verdict, or held hostage",
        "unbonding outlasts judgement; slashes reach unbonding and matured stake; holds end",
        "hard",
        (on_chain("A27"),),
        Gain(saved=1.0),
        time_unit="withdrawal",
    ),
    Attack(
        "A28",
        "more work in flight than stake covers",
        "direct submissions are capped by stake; the worker's own signatures prove the rest",
        "hard",
        (on_chain("A28"),),
        Gain(saved=1.0),
        time_unit="submission",
    ),
    Attack(
        "A32",
        "a jury ground by deposits, a draw awaited until it suits",
        "a place's quotient depends on its own stake only; the draw block is fixed by the "
        "challenge",
        "hard",
        (on_chain("jury"),),
        Gain(saved=0.0),
        time_unit="case",
    ),
)
