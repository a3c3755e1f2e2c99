"""What each party of a run can lose at most, to whom, and what it signed for that.

One place for what commands print before anybody signs, and `muster run show` afterwards. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from muster.client.quantities import format_slashes, format_tokens
from muster.protocol.ids import Address, RunId

if TYPE_CHECKING:
    from muster.chain import ChainView, CourtTerms, RunTerms, RunView

PPM = 10**6


def of_worker(run_id: RunId, terms: RunTerms, stake_wei: int) -> list[str]:
    """Return what a worker can lose in a run where it has so much at stake."""
    return [
        f"at most these {format_tokens(stake_wei)} tokens, to this run only: "
        f"{format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)}, by a quorum of its validators",
        "a jury of the network can overturn that; what is lost is burned and insured, never its "
        "judges'",
        f"your node's signature on two files for one slot of run {run_id} costs what an exact "
        "fraud does",
    ]


def of_validator(run_id: RunId, court: CourtTerms, stake_wei: int) -> list[str]:
    """Return what a validator can lose in a run where it has so much at stake."""
    return [
        f"at most these {format_tokens(stake_wei)} tokens, to this run only: "
        f"{_share(court.wrong_verdict_ppm)} for each batch of which a jury overturned what you "
        "signed",
        f"all of it for two different outcomes of one batch of run {run_id}; nothing for silence, "
        "or for saying that a file could not be had",
    ]


def of_juror(court: CourtTerms, stake_wei: int) -> list[str]:
    """Return what a juror can lose with so much at stake on the bench."""
    return [
        f"at most these {format_tokens(stake_wei)} tokens, for absence only: "
        f"{_share(court.absence_ppm)} for each case that draws you and gets no vote",
        "no run can touch it, and a vote costs nothing, whichever it is",
    ]


def exposure_of(run_id: RunId, terms: RunTerms) -> list[str]:
    """Return in a line for each party what it can lose at most in a run."""
    slashes = format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)
    return [
        f"worker: what it staked for run {run_id}, for fraud that its node signed ({slashes})",
        "validator: what it staked for this run, for what it signed and a jury overturned",
        "owner: what the run holds, for accepted units, and for jurors where its validators erred",
        "anyone else: nothing, and nobody loses anything by silence",
    ]


def _share(ppm: int) -> str:
    return f"{ppm / 10**4:g} %"


def eligible_jurors(view: ChainView, run: RunView, worker: Address | None = None) -> list[Address]:
    """Return who of the bench could be drawn for a case of a run that opens now, about a worker."""
    excluded: Collection[Address] = {*run.seats, run.owner, *([worker] if worker else ())}
    return [juror for juror in view.jurors() if juror not in excluded]


def bench_words(count: int) -> str:
    """Return how many jurors could judge a run's cases, and what follows where nobody could."""
    words = f"{count} of the network's bench could judge a dispute"
    if count:
        return words
    return f"{words}: what the validators sign stands, and what they leave unjudged is void"
