"""A13, A23, A37: attacks that need not be detected because they do not pay.

Each trial measures a profit over honest work in prices of a unit, with the run's own terms, seeds,
caps and calibration.
"""

from random import Random

from muster.app.demo.local_network import PARAMETERS
from muster.client.validator.checks import conduct_of
from muster.inference import substitutes
from muster.lab.redteam.claims import YOUNG
from muster.lab.redteam.contracts import on_chain
from muster.lab.redteam.gain import PPM, Gain
from muster.lab.redteam.models import OtherModel
from muster.lab.redteam.stage import RUN, Stage
from muster.lab.redteam.trials import Attack, Outcome, Variant
from muster.orchestrator.leases.shares import free_leases
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, Step, to_address
from muster.protocol.seeds import problem_indices, ticket_seed
from muster.toploc.sequential_test import Conduct, WorkerHistory

MINTED = 32
"""Identities that a grinder creates for each one that it keeps."""
TICKETS = 32
"""Submissions over which an identity's luck is averaged."""
EASY_COST = 0.5
"""Assumed cost of an easy problem, as a share of a hard one's."""
PROBES = 7
"""Steps of a binary search for a limit."""
PATIENCE_SUBMISSIONS = 30
"""Submissions that a prober makes at the limit that it found."""
INT8_SAVES = 0.5
"""Share of the cost that a prober is assumed to save at any accepted disturbance."""


# A13


def _ease(beacon: Hash32, worker: Address, stage: Stage, step: int) -> float:
    """Return the share of an identity's problems that are in the easier half of the task set."""
    count, size = stage.recipe.sampling.problems_per_submission, len(stage.task_set)
    drawn = [
        number
        for index in range(TICKETS)
        for number in problem_indices(
            ticket_seed(RUN, beacon, worker, Step(step), index), count, size
        )
    ]
    return sum(number < size // 2 for number in drawn) / len(drawn)


def _ground(stage: Stage, random: Random) -> Outcome:
    """Create identities and keep the one with the easiest problems under today's beacon. Its seeds
    depend on the block in which it joins.
    """
    minted = [to_address(random.randbytes(20)) for _ in range(MINTED)]
    today, next_one = keccak(random.randbytes(8)), keccak(random.randbytes(8))
    step = 1 + random.randrange(1000)
    best = max(minted, key=lambda worker: _ease(today, worker, stage, step))
    advantage = _ease(next_one, best, stage, step) - 0.5
    profit = EASY_COST * advantage
    return Outcome(
        True, "JOINED LATER", "beacon unknown", profit=profit,
        knobs={"ease hoped for": _ease(today, best, stage, step)},
    )  # fmt: skip


# A23


def _split(stage: Stage, random: Random) -> Outcome:
    """One stake split over many identities: their units in flight, and the cost of their frauds."""
    least, per_unit = PARAMETERS.required_worker_stake, PARAMETERS.stake_per_unit
    stake = random.randint(least, 50 * least)
    most = stake // least
    count = random.randint(1, most)
    size = stage.recipe.sampling.max_units
    alone = _in_flight(stake, size, per_unit)
    apart = count * _in_flight(stake // count, size, per_unit)
    terms = stage.terms
    # Every submission in flight is forged; each identity is slashed for its own.
    slashed = stake * terms.fraud_ppm // PPM
    won = apart * size * terms.price_wei
    per_price = (won - slashed) / (terms.price_wei * size * max(1, apart))
    # Forged work in flight is never paid before its verdict, so only more units in flight can gain.
    profit = max((apart - alone) / max(1, alone), min(0.0, per_price))
    return Outcome(
        apart <= alone, "NO MORE", "caps and slashes are linear in stake", profit=profit,
        knobs={"identities": count},
    )  # fmt: skip


def _in_flight(stake: int, size: int, per_unit: int) -> int:
    """Return how many submissions of `size` units a stake covers at a time."""
    count = stake // per_unit // size
    assert free_leases((count - 1) * size, size, stake, per_unit) == 1
    assert free_leases(count * size, size, stake, per_unit) == 0
    return count


# A37


def _probed(stage: Stage, random: Random) -> Outcome:
    """Search for the largest disturbance that is accepted with throw-away identities, then work
    just below it until the history alarms.
    """
    low, high, burned = 1e-6, 1e-2, 0.0
    terms = stage.terms
    for _ in range(PROBES):
        middle = (low * high) ** 0.5
        verdict, _ = _disturbed(stage, random, middle)
        if verdict == "ACCEPTED":
            low = middle
        else:
            high = middle
            burned += 1.0 + (terms.slash if verdict == "FRAUD" else 0.0)
    history, limits = WorkerHistory(), stage.calibration.history
    paid = lost = 0.0
    tried = 0
    while tried < PATIENCE_SUBMISSIONS:
        tried += 1
        verdict, conduct = _disturbed(stage, random, low)
        if verdict != "ACCEPTED":
            lost += 1.0 + (terms.slash if verdict == "FRAUD" else 0.0)
            break
        paid += INT8_SAVES
        history = history.after(conduct, limits)
        if history.alarms(limits):
            break
    return Outcome(
        bool(lost) or history.alarms(limits),
        "REJECTED" if lost else "ALARM" if history.alarms(limits) else "UNNOTICED",
        "outside a limit" if lost else "strain of its history",
        found_after=tried,
        profit=(paid - lost - burned) / (PROBES + tried),
        knobs={"limit": low, "slashed in prices": burned},
    )


def _disturbed(stage: Stage, random: Random, scale: float) -> tuple[str, Conduct]:
    """Return the verdict on one submission of a disturbed policy, and its conduct."""
    cheat = OtherModel(stage, random, substitutes.noise(scale))
    judgement = stage.examine(cheat.deliver(stage.ticket(random)))
    if judgement.finding is not None:
        return judgement.finding.verdict.name, Conduct(1.0, 1.0)
    return "ACCEPTED", conduct_of(judgement.replays, stage.calibration)


A13 = Attack(
    "A13",
    "identities minted until one has easy seeds",
    "the seed contains a beacon that is known only once the identity joined the run (check 1)",
    "economic",
    (Variant("chosen under an earlier beacon", _ground), *YOUNG, on_chain("A13")),
    Gain(saved=0.5),
    time_unit="identity",
)

A23 = Attack(
    "A23",
    "one stake, many identities",
    "stake required, units in flight, pay and slashes are linear: splitting adds nothing",
    "economic",
    (Variant("stake split", _split),),
    time_unit="identity",
)

A37 = Attack(
    "A37",
    "the limit found by trying, and work just inside it",
    "each try beyond it costs a stake; a sequential test over the history alarms",
    "economic",
    (Variant("binary search with throw-away identities", _probed),),
    full=60,
)

ATTACKS = (A13, A23, A37)
