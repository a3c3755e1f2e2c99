"""The model's words for parties: stakes, workers, runs, jurors, and the terms they meet on."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

PPM = 1_000_000
BENCH = 0
"""The run that jurors stake for."""
NOBODY = "nobody"
"""The zero address."""
NO_OFFENCE = "no offence"
"""The zero hash."""
NONE, ACTIVE, JAILED, EXITING, BANNED = range(5)
HELD, RELEASED, RESTORED = 1, 2, 3
FRAUD_OFFENCE, EXACT_FRAUD, DOUBLE_SUBMISSION, WRONG_VERDICT = range(1, 5)
DOUBLE_OUTCOME, ABSENT_JUROR, MISRECORD = range(5, 8)
"""Offences, as in the contracts."""
MAX_SEATS = 88
MAX_VERSION_STEP = 1024
MAX_LATER = 256
"""Most later offences that are applied to returned stake."""

Name = tuple[Any, ...] | str
"""Stands for a hash: a tag and the hashed values."""


class Refused(Exception):
    """The call reverts with this error."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(name, args)
        self.name = name
        self.values = args


def need(condition: bool, name: str, *args: Any) -> None:
    if not condition:
        raise Refused(name, *args)


@dataclass(frozen=True)
class Fixed:
    """Constants of a deployment. Small primes and odd shares, so that every rounding shows."""

    required_stake: int = 1009
    required_validator_stake: int = 2003
    required_juror_stake: int = 1511
    activation_delay: int = 3
    jail_time: int = 50
    challenge_window: int = 100
    outcome_deadline: int = 60
    commit_time: int = 40
    reveal_time: int = 30
    draw_delay: int = 2
    jury_size: int = 2
    bond: int = 53
    juror_fee: int = 19
    wrong_verdict_ppm: int = 50_021
    absence_ppm: int = 5_003
    change_delay: int = 461
    slash_pause: int = 50
    slash_cooldown: int = 107
    claim_period: int = 577
    stake_per_unit: int = 3
    unbonding: int = 463
    insurance_ppm: int = 300_007
    reporter_ppm: int = 200_003
    reporter_cap: int = 97

    @property
    def jury_time(self) -> int:
        return self.commit_time + self.reveal_time

    @property
    def judgement_time(self) -> int:
        judged = self.outcome_deadline + 2 * self.challenge_window
        return judged + 2 * self.jury_time + self.slash_pause


@dataclass
class Stake:
    active: int = 0
    unbonding: int = 0
    withdrawable_at: int = 0
    escrows: list[Name] = field(default_factory=list)
    """Names of the escrows of stake taken from it, oldest first."""


@dataclass
class Escrow:
    amount: int
    ppm: int
    batch: int
    position: int
    status: int = HELD


@dataclass
class Worker:
    """A worker in the whole network."""

    number: int
    node: str = NOBODY
    nonce: int = 0


@dataclass
class Member:
    """A worker in one run."""

    status: int = NONE
    active_from: int = 0
    jailed_until: int = 0
    left_at: int = 0
    convictions: int = 0
    """Number of convictions that stand."""
    exact: int = 0
    """Number of these for exact fraud."""
    before: int = NONE
    """Status before the first of these convictions."""


class Terms(NamedTuple):
    price: int
    fraud_ppm: int
    exact_ppm: int
    quorum: int


NO_TERMS = Terms(0, 0, 0, 0)


@dataclass
class Seat:
    bit: int
    since: int
    """When it was first taken."""


@dataclass
class Run:
    owner: str
    trainer: str
    orchestrator: str
    terms: Terms
    """Those of its creation."""
    validators: list[str] = field(default_factory=list)
    """Validators invited at its creation, and then those with a seat."""
    all_terms: list[Terms] = field(default_factory=list)
    """By number, from 1."""
    invited: set[str] = field(default_factory=set)
    seats: dict[str, Seat] = field(default_factory=dict)
    """Seats of all past and present validators, in the order in which they came."""
    paused: bool = False
    closed_at: int = 0
    proposed: Terms = NO_TERMS
    effective_at: int = 0
    versions: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Manifest and block of every published version."""
    slash_paused_until: int = 0

    @property
    def is_open(self) -> bool:
        return not self.paused and not self.closed_at


@dataclass
class Place:
    """A place of the bench."""

    juror: str
    joined_at: int
    left_at: int = 0
