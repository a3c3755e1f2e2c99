"""A24, A25 and A31: lazy and colluding validators, and workers that wait for them.

Played on the production schedule (`muster.protocol.schedule`) and jury draw. These decide which
validators are called, which ones additionally if two disagree, and which jurors sit on the jury.
Colluding validators accept their worker's forgery; honest ones find fraud, and dispute what others
accepted. Profits are the coalition's, in prices of a unit, at the stakes of `make demo`.
"""

from collections.abc import Callable, Sequence
from random import Random

from muster.app.demo.local_network import PARAMETERS, VALIDATOR_STAKE
from muster.client.validator.checking_proofs import is_checked
from muster.lab.economics import judges
from muster.lab.redteam.gain import PPM
from muster.lab.redteam.stage import NOW, RUN, Stage, Worker
from muster.lab.redteam.trials import Attack, Outcome, Play, Variant
from muster.protocol import economics
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, to_address
from muster.protocol.jury import BenchPlace, draw_jury, jury_seed
from muster.protocol.schedule import (
    SignedOutcomes,
    Timing,
    batch_seed,
    draw_order,
    is_reaudited,
    plan_calls,
    timeout_of,
)
from muster.toploc.projections import FINGERPRINT_BYTES

QUORUM = 2
ACCEPTED, FRAUD = keccak(b"accepted"), keccak(b"fraud")
SHARES = (0.1, 0.2, 0.3, 0.4)
"""Shares of the validators that the coalition controls."""
TRAP_RATE = 0.05
"""Default share of traps among the files of `muster validator trap`."""
LOOKS = 200
"""Batches of honest work by a worker that waits for friendly judges."""


class Bench:
    """A run's validators, some of them colluding."""

    def __init__(self, random: Random, share: float) -> None:
        count = random.randint(8, 40)
        self.all = [to_address(random.randbytes(20)) for _ in range(count)]
        self.bought = frozenset(random.sample(self.all, int(share * count)))
        # The network's jurors are different accounts: a former validator of the run cannot judge
        # its cases.
        self.jurors = [BenchPlace(to_address(random.randbytes(20)), NOW) for _ in range(count)]
        self.bought_jurors = frozenset(
            place.juror for place in random.sample(self.jurors, int(share * count))
        )
        deadline_s = PARAMETERS.outcome_deadline_s
        self._timing = Timing(NOW, deadline_s, timeout_of(deadline_s))

    def verdict(self, order: Sequence[Address]) -> tuple[Hash32 | None, int]:
        """Return the outcomes posted for a forged batch, and their delay after its commitment in s.

        Every called validator answers at once; the others do not answer.
        """
        heard: dict[Address, SignedOutcomes] = {}
        for now in range(self._timing.committed_at, self._timing.due_at):
            calls = plan_calls(order, QUORUM, self._timing, now, list(heard.values()))
            if calls.decision is not None:
                return calls.decision, now - self._timing.committed_at
            for validator in calls.called:
                accepts = validator in self.bought
                said = SignedOutcomes(validator, ACCEPTED if accepts else FRAUD, accepts, now)
                heard.setdefault(validator, said)
        return None, PARAMETERS.outcome_deadline_s

    def is_overturned(self, random: Random) -> bool:
        """Return whether a jury of the network overturns the coalition's acceptance."""
        seed = jury_seed(keccak(random.randbytes(8)), keccak(random.randbytes(8)))
        jury = draw_jury(self.jurors, opened_at=NOW + 1, size=PARAMETERS.jury_size, seed=seed)
        honest = sum(juror not in self.bought_jurors for juror in jury)
        return 2 * honest > len(jury)


def _submitted(bench: Bench, order: Sequence[Address], stage: Stage, random: Random) -> Outcome:
    """Return the coalition's result for a forged submission, given an order of judges."""
    terms = stage.terms
    posted, after_s = bench.verdict(order)
    caught, verdict = posted != ACCEPTED, "FRAUD"
    profit = -terms.slash if caught else 1.0
    if posted is None:
        # Nothing was posted: the batch is void, and nobody is paid.
        caught, profit, verdict = True, 0.0, "VOID"
    if posted == ACCEPTED:
        verdict = "ACCEPTED"
        again = is_reaudited(batch_seed(keccak(random.randbytes(8)), RUN, 1, ACCEPTED))
        honest = [v for v in bench.all if v not in bench.bought]
        if again and honest and bench.is_overturned(random):
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
    """Forge only when the newest block's hash would call only friends, else work honestly.

    But the order is drawn from the hash of a later block, that of the commitment.
    """
    bench = Bench(random, random.choice(SHARES))
    for _ in range(LOOKS):
        foreseen = _order(bench, random)
        if all(validator in bench.bought for validator in foreseen[:QUORUM]):
            return _submitted(bench, _order(bench, random), stage, random)
    return Outcome(False, "ACCEPTED", "never foreseen", is_harmless=True, profit=0.0)


# A24


def lazy_profit(stage: Stage) -> float:
    """Return a validator's profit from accepting a file unseen, in prices of the file: the saved
    check minus the expected cost of signing a trap (`muster.lab.economics.judges`).
    """
    terms, sampling = stage.terms, stage.recipe.sampling
    of_workers = economics.WorkerTerms(
        price_wei=terms.price_wei,
        fraud_ppm=terms.fraud_ppm,
        exact_fraud_ppm=terms.fraud_ppm,
        fraud_strikes=stage.calibration.fraud_strikes,
        samples=sampling.problems_per_submission * sampling.samples_per_problem,
        units_per_sample=sampling.max_new_tokens,
        required_stake=PARAMETERS.required_worker_stake,
        stake_per_unit=PARAMETERS.stake_per_unit,
    )
    bench = judges.Bench(
        quorum=QUORUM,
        validator_stake=VALIDATOR_STAKE,
        wrong_verdict_ppm=PARAMETERS.wrong_verdict_ppm,
        bond=PARAMETERS.bond,
        reporter_ppm=PARAMETERS.reporter_ppm,
        reporter_cap=PARAMETERS.reporter_cap,
        jury_size=PARAMETERS.jury_size,
        trap_rate=TRAP_RATE,
    )
    return judges.lazy_profit(of_workers, bench) / (terms.price_wei * terms.units)


MakeUp = Callable[[bytes, bytes, bytes, Random], bytes]
"""Invents fingerprints, given the true ones (only their size and the checked part may be used),
those of another validator, and those of another file."""


def _tenth(right: bytes, _others: bytes, _old: bytes, _random: Random) -> bytes:
    size = len(right) // FINGERPRINT_BYTES // 10 * FINGERPRINT_BYTES
    return right[:size] + bytes(len(right) - size)


def _unseen(make_up: MakeUp) -> Play:
    def play(stage: Stage, random: Random) -> Outcome:
        me, other = (to_address(random.randbytes(20)) for _ in range(2))
        work = Worker(stage, random)
        seen = stage.examine(work.deliver(stage.ticket(random)), seats=(me, other))
        old = stage.examine(work.deliver(stage.ticket(random)), seats=(me,)).fingerprints[me]
        right = seen.fingerprints[me]
        shown = make_up(right, seen.fingerprints[other], old, random)
        return _shown(shown, right, lazy_profit(stage))

    return play


def _checked_elsewhere(stage: Stage, random: Random) -> Outcome:
    """An honest validator on a machine that computes in bfloat16."""
    me = to_address(random.randbytes(20))
    delivery = Worker(stage, random).deliver(stage.ticket(random))
    right = stage.examine(delivery, seats=(me,)).fingerprints[me]
    shown = stage.examine(delivery, seats=(me,), engine=stage.coarse).fingerprints[me]
    return _shown(shown, right, None)


def _shown(shown: bytes, right: bytes, profit: float | None) -> Outcome:
    if is_checked(shown, right):
        return Outcome(False, "ACCEPTED", "", profit=profit)
    return Outcome(True, "REPORTED", "fingerprints of no recomputation", profit=profit)


ATTACKS = (
    Attack(
        "A24",
        "validators that accept without looking, or copy",
        "fingerprints of the recomputed states, committed with the outcome; traps with known "
        "answers",
        "hard",
        (
            Variant("zeros", _unseen(lambda right, _o, _f, _r: bytes(len(right)))),
            Variant("another validator's", _unseen(lambda _right, other, _f, _r: other)),
            Variant("of another file", _unseen(lambda right, _o, old, _r: old[: len(right)])),
            Variant("noise", _unseen(lambda right, _o, _f, r: r.randbytes(len(right)))),
            Variant("none", _unseen(lambda _right, _o, _f, _r: b"")),
            Variant("a tenth of the file checked", _unseen(_tenth)),
            Variant("bfloat16 (honest)", _checked_elsewhere, must_pass=True),
        ),
    ),
    Attack(
        "A25",
        "validators in league with a worker: they accept its forgeries",
        "judges are drawn of the commitment's block; who disagrees calls more; jurors are of the "
        "network's bench",
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
