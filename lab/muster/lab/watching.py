"""How soon validators that do not check are caught: simulations of the network's own schedule.

`python -m muster.lab.watching` prints the tables of docs/guides/watching.md. The production
`muster.protocol.schedule` decides which validators are called and which outcomes are posted. Only
the verdicts are drawn at random, by kinds of validators. A batch is one submission here; with more,
everything takes fewer batches.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb

import click

from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, to_address
from muster.protocol.schedule import (
    REAUDIT_PPM,
    SignedOutcomes,
    Timing,
    draw_order,
    plan_calls,
)

VALIDATORS, QUORUM = 10, 2
"""Size and quorum of the simulated network."""
LONGEST = 1000
"""Most batches of a simulation."""
FRIENDS = 0.02
"""Share of submissions that are a friend's cheats, for colluding validators."""
TIMING = Timing(committed_at=0, deadline_s=3600, timeout_s=60)
ACCEPT, REJECT = keccak(b"accept"), keccak(b"reject")

Verdict = bool
"""Whether a submission is accepted."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of being a validator."""

    name: str
    """Its name in words."""
    share_checked: float
    """Share of its signed work that it recomputes."""
    guess: Callable[[random.Random, Sequence[Verdict]], Verdict]
    """Its verdict on the rest, given earlier verdicts of others."""
    shields_friends: bool = False
    """Whether it accepts a friend's cheats, and checks all else."""


def _copied(_random: random.Random, said: Sequence[Verdict]) -> Verdict:
    return said[0] if said else True


KINDS = (
    Kind("lazy: accepts all", 0.0, lambda _random, _said: True),
    Kind("copies another's verdict", 0.0, _copied),
    Kind("tosses a coin", 0.0, lambda chance, _said: chance.random() < 0.5),
    Kind("checks one in ten, accepts the rest", 0.1, lambda _random, _said: True),
    Kind("in league with a cheater", 1.0, lambda _random, _said: True, shields_friends=True),
)
"""Kinds of validators in the tables."""


@dataclass(frozen=True, slots=True)
class Fall:
    """When a validator was caught, in judged batches; None for never."""

    slashed_at: int | None
    """A wrong verdict with its signature was challenged: by a trap's maker, or a re-audit."""
    proven_at: int | None
    """Its fingerprints were compared by somebody who had recomputed the same work."""


class Watched:
    """A network with a share of validators of one kind, the first of which is watched."""

    def __init__(self, kind: Kind, share: float, trap_rate: float, seed: int) -> None:
        self._kind, self._trap_rate = kind, trap_rate
        self._random = random.Random(seed)
        self._validators = [
            to_address(keccak(bytes([number, seed % 256]))[:20]) for number in range(VALIDATORS)
        ]
        self._false = set(self._validators[: max(1, round(share * VALIDATORS))])
        self.me = self._validators[0]

    def run(self, longest: int = LONGEST) -> Fall:
        """Return when the first validator is caught, within `longest` batches."""
        slashed_at = proven_at = None
        for number in range(1, longest + 1):
            is_slashed, is_proven = self._judge(number)
            slashed_at = slashed_at or (number if is_slashed else None)
            proven_at = proven_at or (number if is_proven else None)
            wants_proof = self._kind.share_checked < 1
            if slashed_at and (proven_at or not wants_proof):
                break
        return Fall(slashed_at, proven_at)

    def _judge(self, number: int) -> tuple[bool, bool]:
        """Judge one batch; return whether the first validator is slashable for it, and proven."""
        chance = self._random
        is_trap = chance.random() < self._trap_rate
        is_friends = self._kind.shields_friends and chance.random() < FRIENDS
        is_good = not (is_trap or is_friends)
        seed = keccak(number.to_bytes(4, "big") + chance.randbytes(8))
        said, computed, decision = self._hear(seed, is_good, is_friends=is_friends)
        if said.get(self.me) is not decision or decision is None:
            return False, False
        honest = computed - self._false
        auditor = chance.choice(self._validators)
        is_audited = decision and chance.random() * 10**6 < REAUDIT_PPM
        if is_audited and auditor not in self._false:
            honest.add(auditor)
        is_wrong = decision and not is_good
        is_slashed = is_wrong and (is_trap or bool(honest))
        return is_slashed, decision and self.me not in computed and bool(honest)

    def _hear(
        self, seed: bytes, is_good: bool, *, is_friends: bool
    ) -> tuple[dict[Address, Verdict], set[Address], Verdict | None]:
        """Return the called validators' verdicts, who computed them, and the posted verdict."""
        order = draw_order(keccak(seed), self._validators)
        said: dict[Address, Verdict] = {}
        computed: set[Address] = set()
        now = 1
        while True:
            heard = [
                SignedOutcomes(who, ACCEPT if yes else REJECT, yes, 1) for who, yes in said.items()
            ]
            calls = plan_calls(order, QUORUM, TIMING, now, heard)
            if calls.decision is not None:
                return said, computed, calls.decision == ACCEPT
            missing = [who for who in calls.called if who not in said]
            if not missing:
                now += TIMING.timeout_s
                if now > TIMING.deadline_s:
                    return said, computed, None
            # Copiers answer last: they wait for somebody to copy.
            for who in sorted(missing, key=lambda each: each in self._false):
                said[who], has_computed = self._say(who, is_good, list(said.values()), is_friends)
                computed |= {who} if has_computed else set()

    def _say(
        self, who: Address, is_good: bool, before: Sequence[Verdict], is_friends: bool
    ) -> tuple[Verdict, bool]:
        kind = self._kind
        if who not in self._false:
            return is_good, True
        if kind.shields_friends and is_friends:
            return True, True
        if self._random.random() < kind.share_checked:
            return is_good, True
        return kind.guess(self._random, before), False


def median_fall(kind: Kind, share: float, trap_rate: float, trials: int) -> tuple[str, str]:
    """Return the median batches until slashed, and until proven, over seeded trials."""
    falls = [Watched(kind, share, trap_rate, seed).run() for seed in range(trials)]
    return (
        _median([fall.slashed_at for fall in falls]),
        _median([fall.proven_at for fall in falls]),
    )


def _median(times: Sequence[int | None]) -> str:
    middle = sorted(LONGEST + 1 if time is None else time for time in times)[len(times) // 2]
    return f"{middle:,}" if middle <= LONGEST else "-"


def wrong_majority(size: int, colluding: float) -> float:
    """Return the probability that most of a random committee colludes, each with `colluding`."""
    return sum(
        comb(size, k) * colluding**k * (1 - colluding) ** (size - k)
        for k in range(size // 2 + 1, size + 1)
    )


def break_even(trap_rate: float, missed: float = 1.0) -> float:
    """Return the slash, in costs of a check, above which checking pays.

    A share `trap_rate` of submissions are traps; a lazy validator signs a share `missed` of them
    wrongly.
    """
    return 1 / (trap_rate * missed)


# The page


def fall_table(trials: int) -> Iterator[str]:
    """Yield the table of times to fall, as lines of Markdown."""
    yield "| validator | of ten | traps 1 %: slashed | traps 5 %: slashed | proof of checking |"
    yield "|---|---|---|---|---|"
    for kind in KINDS:
        for share in (0.1, 0.4, 0.7):
            rare, _ = median_fall(kind, share, 0.01, trials)
            often, proven = median_fall(kind, share, 0.05, trials)
            yield f"| {kind.name} | {round(10 * share)} | {rare} | {often} | {proven} |"


def committee_table() -> list[str]:
    """Return the table of committees that a majority of colluders takes, as lines of Markdown."""
    shares = (0.05, 0.1, 0.2, 0.3, 0.4)
    lines = [
        "| committee | " + " | ".join(f"{share:.0%} collude" for share in shares) + " |",
        "|---" * (len(shares) + 1) + "|",
    ]
    return lines + [
        f"| {size} | " + " | ".join(f"{wrong_majority(size, s):.2g}" for s in shares) + " |"
        for size in (1, 3, 5, 7, 9)
    ]


@click.command()
@click.option("--trials", default=11, help="Networks per cell. [default: 11]")
def main(trials: int) -> None:
    """Print the tables of docs/guides/watching.md."""
    for line in chain(fall_table(trials), [""], committee_table()):
        click.echo(line)


if __name__ == "__main__":
    main()
