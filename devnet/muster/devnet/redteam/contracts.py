"""A11, A26 to A28, A32 and part of others: attacks on the contracts, played by forge.

One trial per fuzz run, with random parameters.
`contracts/test/unit/Attacks*.t.sol` holds the attacks; each fails unless the attack fails. A run
of forge with another seed draws other parameters.
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
MOST_RUNS = 64
"""Of one fuzz test in one run of forge: what the tests themselves state."""


def play_tests(prefix: str) -> PlayMany:
    """Return what plays all fuzz tests whose names go on with `prefix` after `testFuzz_attack_`."""

    def many(_stage: Stage, _random: Random, trials: int) -> list[Outcome]:
        made: list[Outcome] = []
        for number in range(-(-trials // MOST_RUNS)):
            results = _forge(number, min(trials, MOST_RUNS))
            chosen = {name: found for name, found in results.items() if prefix in name}
            if not chosen:
                raise ConfigError(f"no contract test is called testFuzz_attack_{prefix}…")
            for name, (succeeded, runs) in sorted(chosen.items()):
                made += [Outcome(succeeded, "REVERTED" if succeeded else "PAID", name)] * runs
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


def on_chain(prefix: str) -> Variant:
    """Return the variant that plays an attack's fuzz tests."""
    return Variant(f"contracts: {prefix}", many=play_tests(prefix))


A11 = Attack(
    "A11",
    "pending transactions seen and overtaken",
    "what is signed names who is paid; consents name who may use them; votes are committed first",
    "hard",
    (on_chain("A11"),),
    Gain(saved=1.0),
    time_unit="transaction",
)

A26 = Attack(
    "A26",
    "honest work accused for the proceeds",
    "judges get nothing of a slash; an accuser's bond is burned when it loses",
    "economic",
    (on_chain("A26"),),
    Gain(saved=0.0),
    time_unit="case",
)

A27 = Attack(
    "A27",
    "stake withdrawn before the verdict, or held hostage",
    "unbonding outlasts judgement; slashes reach unbonding and matured stake; holds end",
    "hard",
    (on_chain("A27"),),
    Gain(saved=1.0),
    time_unit="withdrawal",
)

A28 = Attack(
    "A28",
    "more work in flight than stake covers",
    "direct submissions are capped by stake; the worker's own signatures prove the rest",
    "hard",
    (on_chain("A28"),),
    Gain(saved=1.0),
    time_unit="submission",
)

A32 = Attack(
    "A32",
    "a jury ground by deposits, a draw awaited until it suits",
    "a place's quotient depends on its own stake only; the draw block is fixed by the challenge",
    "hard",
    (on_chain("jury"),),
    Gain(saved=0.0),
    time_unit="case",
)

ATTACKS = (A11, A26, A27, A28, A32)
