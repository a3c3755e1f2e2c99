"""The model's words for parties: stakes, workers, runs, and the terms they meet on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

PPM = 1_000_000
NOBODY = "nobody"
"""The zero address."""
NO_OFFENCE = "no offence"
"""The zero hash."""
NONE, ACTIVE, JAILED, EXITING, BANNED = range(5)
HELD, RELEASED, RESTORED = 1, 2, 3
MAX_SEATS = 88

Name = tuple[Any, ...] | str
"""What stands for a hash: a tag, and what is hashed."""


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
    """What a deployment fixes. Small primes and odd shares, so that every rounding shows."""

    required_stake: int = 1009
    required_validator_stake: int = 2003
    activation_delay: int = 3
    jail_time: int = 50
    challenge_window: int = 100
    outcome_deadline: int = 60
    commit_time: int = 40
    reveal_time: int = 30
    draw_delay: int = 2
    jury_size: int = 2
    challenge_bond: int = 53
    wrong_verdict_ppm: int = 50_021
    absence_ppm: int = 5_003
    change_delay: int = 290
    slash_pause: int = 50
    slash_cooldown: int = 107
    claim_period: int = 400
    stake_per_unit: int = 3
    unbonding: int = 300
    insurance_ppm: int = 300_007
    reporter_ppm: int = 200_003
    reporter_cap: int = 97

    @property
    def jury_time(self) -> int:
        return self.commit_time + self.reveal_time

    @property
    def judgement_time(self) -> int:
        return self.outcome_deadline + self.challenge_window + self.jury_time + self.slash_pause


@dataclass
class Stake:
    active: int = 0
    unbonding: int = 0
    withdrawable_at: int = 0
    held_until: int = 0
    open_cases: int = 0


@dataclass
class Escrow:
    owner: str
    reporter: str
    amount: int
    status: int = HELD


@dataclass
class Worker:
    node: str
    number: int
    active_from: int
    status: int = ACTIVE
    nonce: int = 1
    jailed_until: int = 0
    before: int = NONE
    """Status at the first conviction that stands."""
    convictions: list[Name] = field(default_factory=list)
    """Offences that stand."""
    exact: int = 0
    """How many of them count as exact."""


class Terms(NamedTuple):
    price: int
    fraud_ppm: int
    exact_ppm: int
    quorum: int


NO_TERMS = Terms(0, 0, 0, 0)


@dataclass
class Seat:
    bit: int
    seated: bool
    seated_at: int
    unseated_at: int = 0


@dataclass
class Run:
    owner: str
    trainer: str
    orchestrator: str
    terms: Terms
    validators: list[str] = field(default_factory=list)
    seats: dict[str, Seat] = field(default_factory=dict)
    paused: bool = False
    closed_at: int = 0
    proposed: Terms = NO_TERMS
    effective_at: int = 0
    versions: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Manifest and block of every published version."""
    beacons: set[int] = field(default_factory=set)
    slash_paused_until: int = 0

    @property
    def is_open(self) -> bool:
        return not self.paused and not self.closed_at
