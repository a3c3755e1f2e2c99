"""The permanent parameters of a deployment, with their bounds and reasons, and three profiles.

The contracts refuse only values that break them. A profile also refuses values that are unwise for
its kind of chain, and has suitable defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from muster.protocol.ids import Address, to_address

TOKEN = 10**18
"""Wei of one token."""
PPM = 1_000_000
"""One whole, in millionths."""
FAUCET_CHAIN_ID = 31337
"""The only chain whose token has a faucet: `MusterToken.FAUCET_CHAIN_ID`."""
MINUTE, HOUR, DAY = 60, 3600, 86_400
_TIME = 2**39
"""Largest number of seconds: some end times are stored in 40 bits."""
_STAKE = 2**88 - 1
"""Most wei of one StakeVault account, so that an escrow of all of it fits a storage slot."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The values that a parameter may have, and why."""

    least: int
    """The smallest."""
    most: int
    """The largest."""
    reason: str
    """Why smaller and larger values are refused."""

    def problem(self, name: str, value: int) -> str | None:
        """Return what is wrong with a value; None if it is allowed."""
        if value < self.least:
            return f"{name} {value} is below {self.least}: {self.reason}"
        if value > self.most:
            return f"{name} {value} is above {self.most}: {self.reason}"
        return None


_VAULT = Bound(0, _STAKE, "an account of StakeVault holds less than 2^88 wei")
_END = Bound(0, _TIME, "a time of 40 bits must hold its end")
Amount = Annotated[int, _VAULT]
"""Wei that an account of StakeVault can hold."""
Deposit = Annotated[int, Bound(0, _STAKE, "nobody could put up more than there is")]
"""Wei of a bond or a fee."""
Share = Annotated[int, Bound(0, PPM, "it is a share of a whole of 1000000 millionths")]
"""Millionths."""
Wait = Annotated[int, _END]
"""Seconds, may be 0."""
Window = Annotated[
    int, Bound(1, _TIME, "it must take time, and a time of 40 bits must hold its end")
]
"""Seconds in which something can be done."""


class DeployParameters(BaseModel):
    """The permanent parameters of a deployment. Defaults suit development; amounts are in wei."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    initial_supply: Amount = 300_000_000 * TOKEN
    """Tokens minted to the owner."""
    required_worker_stake: Amount = 100 * TOKEN
    """Active stake a worker must hold in each of its runs."""
    required_validator_stake: Amount = 500 * TOKEN
    """Active stake a validator must hold in each of its runs."""
    required_juror_stake: Amount = 500 * TOKEN
    """Active stake a juror of the network must hold on the bench."""
    activation_delay_blocks: Annotated[
        int, Bound(0, 1_000_000, "a worker waits for so many blocks")
    ] = 1
    """Blocks from registration until a worker counts as active."""
    jail_time_s: Wait = 60
    """Seconds a jailed worker must wait."""
    outcome_deadline_s: Window = 600
    """Seconds after the commitment by which outcomes are due."""
    challenge_window_s: Wait = 30
    """Seconds after posting during which an outcome may be challenged. Workers have as many to
    appeal for a batch that is due (`appealTime`)."""
    vote_commit_s: Annotated[int, Bound(2, _TIME, "a jury is drawn in the first half of it")] = 80
    """Seconds after the opening of a case until which jurors may commit to a vote."""
    vote_reveal_s: Window = 40
    """Further seconds in which they may reveal it."""
    draw_delay_blocks: Annotated[
        int, Bound(1, 256, "the hash that decides must not be known yet, and jurors wait for it")
    ] = 1
    """Blocks from the opening of a case to the block whose hash decides its jury."""
    jury_size: Annotated[
        int, Bound(1, 64, "a case without jurors decides nothing, and a draw ends")
    ] = 3
    """Jurors of a case; fewer if fewer are eligible."""
    wrong_verdict_ppm: Share = 50_000
    """Share of a signer's stake that an overturned verdict costs, in millionths."""
    absence_ppm: Share = 5_000
    """Share of a juror's stake that a missing vote costs, in millionths."""
    stake_per_unit: Annotated[
        int, Bound(1, _STAKE, "work in flight is what stake divided by it allows")
    ] = TOKEN // 10_000
    """Stake behind one unit in flight."""
    change_delay_s: Wait = 3600
    """Seconds between announcing a run's terms and their effect; must outlast judgement."""
    slash_pause_s: Window = 30
    """Seconds that a pause of a run's slashing lasts."""
    slash_cooldown_s: Annotated[int | None, _END] = None
    """Least seconds between two pauses of slashing; at least the challenge window. By default the
    longer of challenge window and pause."""
    claim_period_s: Window = 90 * 24 * 3600
    """Seconds that workers of a closed run have to claim; must outlast judgement and a window."""
    unbonding_s: Window = 3600
    """Seconds from an unbond request to its withdrawal; must outlast judgement."""
    bond: Deposit = 10 * TOKEN
    """Bond of a claimant, or of a worker that submits directly."""
    juror_fee: Deposit = TOKEN
    """Most that a juror of the prevailing ruling earns."""
    owner: Annotated[Address, BeforeValidator(to_address)] | None = None
    """Account that receives the initial supply; by default the deploying account."""
    insurance: Annotated[Address, BeforeValidator(to_address)] | None = None
    """Account that receives the insured share of slashes; by default the owner."""
    insurance_ppm: Share = 200_000
    """Insured share of a slash, in millionths."""
    reporter_ppm: Share = 100_000
    """Reporter's share of a slash, in millionths; the rest is burned."""
    reporter_cap: Annotated[int, Bound(0, _STAKE, "an escrow holds less than 2^88 wei")] = (
        50 * TOKEN
    )
    """Most that a reporter gets for one offence."""

    @property
    def judgement_s(self) -> int:
        """Seconds from a commitment to the latest time at which its fraud can be executed."""
        # Unjudged work can be appealed for a challenge window, and then the jury's outcome
        # disputed.
        judged = self.outcome_deadline_s + 2 * self.challenge_window_s
        return judged + 2 * (self.vote_commit_s + self.vote_reveal_s) + self.slash_pause_s

    @property
    def pause_distance_s(self) -> int:
        """Seconds from the end of a pause of slashing to the earliest next one."""
        if self.slash_cooldown_s is None:
            return max(self.challenge_window_s, self.slash_pause_s)
        return self.slash_cooldown_s

    def owner_of(self, account: Address) -> Address:
        """Return the account that receives the supply when `account` deploys."""
        return self.owner or account

    def insurance_of(self, account: Address) -> Address:
        """Return the account that receives the insured share of slashes when `account` deploys."""
        return self.insurance or self.owner_of(account)

    @model_validator(mode="after")
    def _are_within_bounds(self) -> Self:
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and (problem := bound.problem(name, value)):
                raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _judgement_is_outlasted(self) -> Self:
        judged = self.judgement_s
        # After a pause, a fraud verdict can be overturned, and its work paid, one window later.
        settled = judged + self.challenge_window_s
        least = {"unbonding_s": judged + 1, "claim_period_s": settled + 1, "change_delay_s": judged}
        for name, seconds in least.items():
            if getattr(self, name) < seconds:
                raise ValueError(
                    f"{name} {getattr(self, name)} is below {seconds}: it must outlast "
                    "outcome_deadline_s + 2 challenge_window_s + 2 (vote_commit_s + "
                    "vote_reveal_s) + slash_pause_s"
                )
        if self.pause_distance_s < self.challenge_window_s:
            raise ValueError(
                f"slash_cooldown_s {self.slash_cooldown_s} is below the challenge window of "
                f"{self.challenge_window_s} s: pauses would reopen what is final"
            )
        if self.juror_fee * self.jury_size > self.bond:
            raise ValueError(
                f"juror_fee {self.juror_fee} for {self.jury_size} jurors is more than a bond of "
                f"{self.bond}: a lost bond pays the jurors"
            )
        if self.insurance_ppm + self.reporter_ppm > PPM:
            raise ValueError("insurance_ppm and reporter_ppm add up to more than the whole")
        return self


BOUNDS: Mapping[str, Bound] = {
    name: bound
    for name, parameter in DeployParameters.model_fields.items()
    for bound in parameter.metadata
    if isinstance(bound, Bound)
}
"""The contracts' bounds, by parameter."""

_NOTICE = "people must have time to see an outcome and to act on it"
_STAKED = "what is not staked cannot be slashed"


def _profile_bounds(notice_s: int, answer_s: int, least_stake: int) -> dict[str, Bound]:
    """Return bounds from the least times for people to notice and programs to answer, and the least
    stake.
    """
    longest = "money waits for it, and it can never be changed: no longer than 60 days"
    return {
        "outcome_deadline_s": Bound(
            answer_s, 30 * DAY, f"validators must outlive an outage; {longest}"
        ),
        "challenge_window_s": Bound(notice_s, 30 * DAY, f"{_NOTICE}; {longest}"),
        "vote_commit_s": Bound(answer_s, 30 * DAY, f"jurors recompute the work; {longest}"),
        "vote_reveal_s": Bound(answer_s, 30 * DAY, f"a missed vote is punished; {longest}"),
        "slash_pause_s": Bound(answer_s, 30 * DAY, f"a pause must outlast an outage; {longest}"),
        "unbonding_s": Bound(notice_s, 60 * DAY, longest),
        "change_delay_s": Bound(notice_s, 60 * DAY, longest),
        "required_worker_stake": Bound(least_stake, _STAKE, _STAKED),
        "required_validator_stake": Bound(least_stake, _STAKE, _STAKED),
        "required_juror_stake": Bound(least_stake, _STAKE, _STAKED),
    }


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of chain, with its defaults and its bounds."""

    about: str
    """Description in one line."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Defaults that differ from those of DeployParameters."""
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """Bounds in addition to BOUNDS."""
    has_faucet: bool = False
    """Whether anybody may mint tokens: on the development chain only."""

    def problem(self, parameters: DeployParameters) -> str | None:
        """Return what this kind of chain refuses in parameters; None if it accepts them."""
        for name, bound in self.bounds.items():
            if problem := bound.problem(name, getattr(parameters, name)):
                return problem
        return None


PROFILES: Mapping[str, Profile] = {
    "dev": Profile(
        f"windows of seconds, a faucet: for a development chain ({FAUCET_CHAIN_ID}) only",
        has_faucet=True,
    ),
    "testnet": Profile(
        "windows of hours: for tokens without value",
        defaults={
            "activation_delay_blocks": 5,
            "jail_time_s": HOUR,
            "outcome_deadline_s": HOUR,
            "challenge_window_s": 2 * HOUR,
            "vote_commit_s": 2 * HOUR,
            "vote_reveal_s": HOUR,
            "slash_pause_s": 2 * HOUR,
            "change_delay_s": 18 * HOUR,
            "unbonding_s": DAY,
        },
        bounds=_profile_bounds(10 * MINUTE, 5 * MINUTE, 1),
    ),
    "mainnet": Profile(
        "windows of days: for tokens with value",
        defaults={
            "activation_delay_blocks": 50,
            "jail_time_s": DAY,
            "outcome_deadline_s": DAY,
            "challenge_window_s": 3 * DAY,
            "vote_commit_s": 2 * DAY,
            "vote_reveal_s": DAY,
            "slash_pause_s": 2 * DAY,
            "change_delay_s": 16 * DAY,
            "claim_period_s": 180 * DAY,
            "unbonding_s": 21 * DAY,
        },
        bounds=_profile_bounds(DAY, 6 * HOUR, TOKEN),
    ),
}
"""Kinds of chains, by name."""
