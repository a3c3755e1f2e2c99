"""What each party of a run, or of the bench, can lose: the texts that are shown before it signs."""

from muster.chain import CourtTerms, RunTerms, StakeAccount
from muster.client.quantities import format_share, format_slashes, format_tokens
from muster.protocol.ids import RunId


def of_worker(run_id: RunId, terms: RunTerms, stake: StakeAccount) -> list[str]:
    """Return what a worker with this stake can lose in a run."""
    return [
        f"{_at_most(stake)}, to this run only: "
        f"{format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)}, by a quorum of its validators",
        (
            "a jury of the network can overturn that; lost stake is burned or goes to the "
            "insurance, never to its judges"
        ),
        f"your node's signature on two files for one slot of run {run_id} costs what an exact "
        "fraud does",
    ]


def of_validator(
    run_id: RunId, court: CourtTerms, stake: StakeAccount, required_wei: int
) -> list[str]:
    """Return what a validator with this stake can lose in a run that requires so much."""
    return [
        f"{_at_most(stake)}, to this run only: "
        f"{format_share(court.wrong_verdict_ppm)} for each batch of which a jury overturned what "
        "you signed",
        f"all of it for two different outcomes of one batch of run {run_id}; nothing for silence, "
        "or for saying that a file could not be had",
        _of_place("seat", required_wei),
    ]


def of_juror(court: CourtTerms, stake: StakeAccount, required_wei: int) -> list[str]:
    """Return what a juror with this stake can lose on a bench that requires so much."""
    return [
        f"{_at_most(stake)}, for absence only: "
        f"{format_share(court.absence_ppm)} for each case that draws you and gets no vote",
        "no run can touch it, and a vote costs nothing, whichever it is",
        _of_place("place on the bench", required_wei),
    ]


def _at_most(stake: StakeAccount) -> str:
    tokens = f"at most these {format_tokens(stake.active_wei + stake.unbonding_wei)} tokens"
    if not stake.unbonding_wei:
        return tokens
    return f"{tokens} ({format_tokens(stake.unbonding_wei)} of them unbond)"


def _of_place(place: str, required_wei: int) -> str:
    return (
        f"with less than {format_tokens(required_wei)} tokens left the {place} is lost: stake more "
        "than is required (--amount) to keep it after a fine"
    )


def exposure_of(run_id: RunId, terms: RunTerms) -> list[str]:
    """Return one line per party about the most that it can lose in a run."""
    slashes = format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)
    return [
        f"worker: what it staked for run {run_id}, for fraud that its node signed ({slashes})",
        "validator: what it staked for this run, for what it signed and a jury overturned",
        "owner: what the run holds, for accepted units, and for jurors where its validators erred",
        "anyone else: nothing, and nobody loses anything by silence",
    ]
