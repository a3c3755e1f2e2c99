"""What any account can send about a submission when its run's orchestrator does not.

  void      frees what a batch holds that nobody judged
  execute   takes the stake that a fraud costs, into escrow
  finalise  burns that stake, and pays the insurance and the reporter, once the fraud is final
  return    gives a worker the bond back that it paid to submit the work itself

`muster dispute settle` sends them. The next step follows from the chain alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from muster.chain import (
    ZERO_ADDRESS,
    BatchStatus,
    BatchView,
    CaseView,
    Chain,
    ChainView,
    ClaimView,
    Receipt,
    SlashState,
    SlashView,
    SubmissionPlace,
)
from muster.chain.frauds import charge_of, slash_for
from muster.chain.structs import CommittedWork
from muster.client.disputes.cases import awaits_proof
from muster.client.disputes.claims import OVERTAKEN, case_id_of, explained
from muster.client.quantities import format_time, format_tokens
from muster.protocol.errors import ApiError, ConfigError, ContractRevert
from muster.protocol.ids import Address
from muster.protocol.merkle import batch_proof, batch_root
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.client.chain_facts import Times
    from muster.client.sources import Sources


class OpenStep(StrEnum):
    """A step that is possible now."""

    VOID = "void"
    """Declare a batch void that nobody judged."""
    PROVE = "prove"
    """Prove that the batch holds what opened a closed case."""
    EXECUTE = "execute"
    """Take the stake that a fraud costs."""
    FINALISE = "finalise"
    """Burn and share that stake."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The next step for a submission."""

    step: OpenStep | None = None
    """The step that any account can take now, if any."""
    words: str = ""
    """Why no step is possible now, and from when; empty once all steps are taken."""


def unsettled(
    view: ChainView, place: SubmissionPlace, now: float, times: Times
) -> Unsettled | None:
    """Return the next step for a submission at chain time `now`; None if it needs none: it is
    judged, and stands as no fraud.
    """
    if place.batch.records is None:
        return _of_unjudged(view, place, now, times)
    case = view.cases.get(case_id_of(place))
    if case is not None and awaits_proof(view, case, times.court):
        return Unsettled(OpenStep.PROVE)
    if view.standing_verdict(place.batch.batch_id, place.position) is Verdict.FRAUD:
        return _of_fraud(view, place, now, times)
    return None


def _of_unjudged(view: ChainView, place: SubmissionPlace, now: float, times: Times) -> Unsettled:
    batch, case = place.batch, view.cases.get(case_id_of(place))
    if batch.is_void:
        return Unsettled()
    if case is not None and not case.closed:
        return Unsettled(words="jurors of the network judge the batch")
    void_at = batch.due_at(times.outcome_deadline_s) + times.appeal_s
    if now >= void_at:
        return Unsettled(OpenStep.VOID)
    return Unsettled(
        words=f"batch {batch.batch_id} has no outcomes: it can be declared void from "
        f"{format_time(void_at)}"
    )


def _of_fraud(view: ChainView, place: SubmissionPlace, now: float, times: Times) -> Unsettled:
    batch, run = place.batch, view.runs[place.batch.run_id]
    charge = charge_of(view, batch.batch_id, place.position, commit_time_s=times.court.commit_time)
    if charge is None:
        return Unsettled(words="nobody can execute this fraud: its record names no worker")
    slash = slash_for(view, batch.run_id, charge)
    if slash is not None:
        return _of_slash(view, place, slash, now, times)
    if run.is_slashing_paused(int(now)):
        until = format_time(run.slashing_paused_until)
        return Unsettled(words=f"slashing in run {run.run_id} is paused until {until}")
    return Unsettled(OpenStep.EXECUTE)


def _of_slash(
    view: ChainView, place: SubmissionPlace, slash: SlashView, now: float, times: Times
) -> Unsettled:
    batch, run = place.batch, view.runs[place.batch.run_id]
    if (slash.batch_id, slash.position) != (batch.batch_id, place.position):
        return Unsettled(words=f"this slot cost its worker stake already, in {slash.tx_hash}")
    if slash.state is not SlashState.ESCROWED:
        return Unsettled()
    case = view.cases.get(case_id_of(place))
    if case is not None and not case.closed:
        return Unsettled(words="the stake is held until the case about it is closed")
    final_at = run.fraud_closes_at(batch.posted_at or 0, times.challenge_window_s)
    if now >= final_at:
        return Unsettled(OpenStep.FINALISE)
    return Unsettled(
        words=f"the stake is held until {format_time(final_at)}: then the same command burns it, "
        "and pays the insurance and the reporter"
    )


# The work that a fraud is about


async def find_work(
    place: SubmissionPlace,
    case: CaseView | None,
    sources: Sources,
    copy: Sequence[BatchEntry] | None = None,
    *,
    is_answered: Callable[[ClaimView], bool] = lambda _: True,
) -> CommittedWork:
    """Return a submission with its signature and its proof in the batch.

    It comes from the chain if its worker or a claim showed it there, else from a copy of the
    batch's submissions, else from a source. `is_answered` tells whether a worker answers for the
    signature in a claim: one with a key that was given up takes no stake. Raises ConfigError for
    another batch's copy, ApiError when no source shows the batch.
    """
    batch = place.batch
    if batch.work is not None:
        return CommittedWork(batch.work.submission, batch.work.node_signature, ())
    for made in case.claims if case is not None else ():
        if batch.is_proven(made, place.position) and is_answered(made):
            return CommittedWork(made.submission, made.node_signature, made.proof)
    entries = copy
    if entries is None:
        try:
            entries = await sources.batch(batch.batch_id, batch.root, batch.count)
        except ApiError as error:
            error.hint = SHOW_HINT
            raise
    leaves = [entry.submission.leaf() for entry in entries]
    if len(leaves) != batch.count or batch_root(leaves) != batch.root:
        raise ConfigError(f"the copy of batch {batch.batch_id} is of another one", hint=SHOW_HINT)
    entry = entries[place.position]
    proof = tuple(batch_proof(leaves, place.position))
    return CommittedWork(entry.submission, entry.signature, proof)


SHOW_HINT = (
    "name a server that shows the batch with --orchestrator or --source, or a folder with a copy "
    "of the orchestrator's files or an evidence bundle with --evidence"
)


# Sending

_OVERTAKEN = OVERTAKEN | {"LedgerBatchMismatch"}
"""Contract errors that mean somebody else was first: a void batch has no header any more."""


async def send(
    chain: Chain,
    step: OpenStep,
    place: SubmissionPlace,
    find: Callable[[], Awaitable[CommittedWork]],
) -> Receipt | None:
    """Take a step, and return its receipt; None if somebody else was first. `find` finds the
    submission that a fraud is about.
    """
    try:
        return await explained(_call(chain, step, place, find))
    except ContractRevert as error:
        if error.name in _OVERTAKEN:
            return None
        raise


async def _call(
    chain: Chain,
    step: OpenStep,
    place: SubmissionPlace,
    find: Callable[[], Awaitable[CommittedWork]],
) -> Receipt:
    if step is OpenStep.VOID:
        return await chain.ledger.void_batch(place.batch.header())
    proof = place.batch.prove(place.position)
    if step is OpenStep.FINALISE:
        return await chain.ledger.finalise_fraud(proof)
    if step is OpenStep.PROVE:
        return await chain.court.prove(proof, await find())
    return await chain.ledger.execute_fraud(proof, await find())


async def bond_payer(chain: Chain, batch: BatchView) -> Address | None:
    """Return who gets the bond of a finished batch back; None while it is not finished, or if none
    is held.
    """
    if batch.status is not BatchStatus.JUDGED and not batch.is_void:
        return None
    [payer] = await chain.read("DisputeCourt", "bondOf", [batch.batch_id])
    return None if payer == ZERO_ADDRESS else Address(payer)


async def return_bond(chain: Chain, batch: BatchView) -> Receipt | None:
    """Give back the bond of a finished batch, and return the receipt; None if none is held."""
    if await bond_payer(chain, batch) is None:
        return None
    try:
        named = chain.once(f"return the bond of batch {batch.batch_id}")
        return await named.court.return_bond(batch.header())
    except ContractRevert as error:
        if error.name == "CourtBondHeld":
            return None
        raise


def told_bond(receipt: Receipt) -> str:
    """Return what returning a bond did, in one line."""
    args = receipt.event("BondReturned").args
    amount = format_tokens(args["amount"])
    return f"returned the bond of {amount} tokens to {args['payer']}, {receipt.tx_hash}"


def told(step: OpenStep, place: SubmissionPlace, receipt: Receipt) -> str:
    """Return what a step did, in one line."""
    if step is OpenStep.VOID:
        return f"batch {place.batch.batch_id} is void, {receipt.tx_hash}"
    if step is OpenStep.PROVE:
        return f"proved what the batch holds, {receipt.tx_hash}"
    if step is OpenStep.EXECUTE:
        args = receipt.event("FraudExecuted").args
        return (
            f"executed the fraud: took {format_tokens(args['amount'])} tokens of {args['worker']}, "
            f"{receipt.tx_hash}"
        )
    args = receipt.event("SlashReleased").args
    burned, insured, rewarded = (
        format_tokens(args[name]) for name in ("burned", "insured", "rewarded")
    )
    reporter = args["reporter"]
    shared = "" if reporter == ZERO_ADDRESS else f", {rewarded} to the reporter {reporter}"
    return (
        f"released the stake: {burned} tokens burned, {insured} to the insurance{shared}, "
        f"{receipt.tx_hash}"
    )
