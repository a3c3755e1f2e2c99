"""A25 and A31: validators in league with workers, and workers that await their judges.

Played on the production schedule (`muster.protocol.schedule`) and jury draw: who is called, who is
called besides when two disagree, what is checked once more, who sits on the jury. Colluding
validators accept their worker's forgery, honest ones find fraud and challenge what others accepted.
Profits are of the coalition, in prices of a unit, at the stakes of `make demo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from muster.devnet.network import PARAMETERS, VALIDATOR_STAKE
from muster.devnet.redteam.gain import PPM
from muster.devnet.redteam.stage import NOW, RUN, Stage
from muster.devnet.redteam.trials import Attack, Outcome, Play, Variant
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, to_address
from muster.protocol.jury import draw_jury, jury_seed
from muster.protocol.schedule import (
    Statement,
    Timing,
    batch_seed,
    draw_order,
    is_reaudited,
    plan_calls,
    timeout_of,
)

QUORUM = 2
ACCEPTED, FRAUD = keccak(b"accepted"), keccak(b"fraud")
SHARES = (0.1, 0.2, 0.3, 0.4)
"""Of the validators, in the coalition's hands."""
LOOKS = 200
"""Batches that a worker lets pass honestly while it waits for the judges it wants."""


class Bench:
    """A run's validators, some of them in league."""

    def __init__(self, random: Random, share: float) -> None:
        count = random.randint(8, 40)
        self.all = [to_address(random.randbytes(20)) for _ in range(count)]
        self.bought = frozenset(random.sample(self.all, int(share * count)))
        deadline_s = PARAMETERS.outcome_deadline_s
        self._timing = Timing(NOW, deadline_s, timeout_of(deadline_s))

    def verdict(self, order: Sequence[Address]) -> tuple[Hash32 | None, int]:
        """Return what is posted of a forged batch, and how many seconds after its commitment.

        Everybody says at once what it is asked for; nobody whom nobody called says anything.
        """
        heard: dict[Address, Statement] = {}
        for now in range(self._timing.committed_at, self._timing.due_at):
            calls = plan_calls(order, QUORUM, self._timing, now, list(heard.values()))
            if calls.decision is not None:
                return calls.decision, now - self._timing.committed_at
            for validator in calls.called:
                accepts = validator in self.bought
                said = Statement(validator, ACCEPTED if accepts else FRAUD, accepts, now)
                heard.setdefault(validator, said)
        return None, PARAMETERS.outcome_deadline_s

    def signers(self, order: Sequence[Address]) -> list[Address]:
        """Return the quorum of the coalition that signs an acceptance."""
        return [validator for validator in order if validator in self.bought][:QUORUM]

    def is_overturned(self, random: Random, signers: Sequence[Address]) -> bool:
        """Return whether a jury without the signers overturns their acceptance."""
        weights = [0 if v in signers else VALIDATOR_STAKE for v in self.all]
        seed = jury_seed(keccak(random.randbytes(8)), keccak(random.randbytes(8)))
        jury = draw_jury(weights, PARAMETERS.jury_size, seed)
        honest = sum(self.all[place] not in self.bought for place in jury)
        return 2 * honest > len(jury)


def _submitted(bench: Bench, order: Sequence[Address], stage: Stage, random: Random) -> Outcome:
    """Return what a forged submission brings its coalition under an order of judges."""
    terms = stage.terms
    posted, after_s = bench.verdict(order)
    caught, verdict = posted != ACCEPTED, "FRAUD"
    profit = -terms.slash if caught else 1.0
    if posted is None:
        # Nothing was posted: the batch stands as claimed, which no honest validator lets happen.
        caught, profit, verdict = False, 1.0, "OVERDUE"
    if posted == ACCEPTED:
        verdict = "ACCEPTED"
        again = is_reaudited(batch_seed(keccak(random.randbytes(8)), RUN, 1, ACCEPTED))
        honest = [v for v in bench.all if v not in bench.bought]
        if again and honest and bench.is_overturned(random, bench.signers(order)):
            lost = QUORUM * VALIDATOR_STAKE * PARAMETERS.wrong_verdict_ppm / PPM
            profit = -terms.slash - lost / (terms.price_wei * terms.units)
            caught, verdict = True, "OVERTURNED"
    return Outcome(
        caught, verdict, "an honest validator was called", found_after=float(after_s),
        profit=profit, knobs={"validators": len(bench.all), "in league": len(bench.bought)},
    )  # fmt: skip


def _order(bench: Bench, random: Random) -> Sequence[Address]:
    seed = batch_seed(keccak(random.randbytes(8)), RUN, 1 + random.randrange(1000), ACCEPTED)
    return draw_order(seed, bench.all)


def _colluding(share: float) -> Play:
    def play(stage: Stage, random: Random) -> Outcome:
        bench = Bench(random, share)
        return _submitted(bench, _order(bench, random), stage, random)

    return play


def _awaited(stage: Stage, random: Random) -> Outcome:
    """Forge only when the newest block's hash would call none but friends.

    The order is drawn of the hash of a later block, that of the commitment.
    """
    bench = Bench(random, random.choice(SHARES))
    for _ in range(LOOKS):
        foreseen = _order(bench, random)
        if all(validator in bench.bought for validator in foreseen[:QUORUM]):
            break
    return _submitted(bench, _order(bench, random), stage, random)


ATTACKS = (
    Attack(
        "A25",
        "validators in league with a worker: they accept its forgeries",
        "judges are drawn of the commitment's block; who disagrees calls more; juries exclude "
        "signers",
        "economic",
        tuple(
            Variant(f"{share:.0%} of the validators", _colluding(share), share) for share in SHARES
        ),
        time_unit="s",
    ),
    Attack(
        "A31",
        "cheating only where friendly judges, or none, are foreseen",
        "every submission is judged, by whom is drawn after it is committed",
        "economic",
        (Variant("the newest block as an oracle", _awaited),),
        time_unit="s",
    ),
)
