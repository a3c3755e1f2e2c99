"""A claim that an outcome is wrong, from its offer to the end of its case.

A claim is announced as a hash, and made in a later block: nobody who reads it can be first. Its
salt follows from the claimant's key, so a command that was killed in between goes on. Anybody may
settle a case and fine those at fault: jurors' programs do it, or `muster dispute settle`.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from muster.chain import (
    CaseView,
    Chain,
    ChainView,
    CourtTerms,
    OutcomeProof,
    Receipt,
    StandingOutcome,
    SubmissionPlace,
)
from muster.chain.structs import Offence
from muster.client.disputes.cases import (
    Penalty,
    eligible_jurors,
    ending_of,
    fees_due,
    next_of,
    penalties_of,
    phase_of,
)
from muster.client.preflight import gas_money, require_gas
from muster.client.quantities import format_coins, format_duration, format_time, format_tokens
from muster.protocol.errors import ConfigError, ContractRevert
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import Ruling, claim_announcement, summons_of
from muster.protocol.messages import Reason, Verdict

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.client.sources import Sources


MAX_SOURCES = 16
"""Sources that a claim may name on chain."""
BLOCK_PATIENCE_S = 120.0
"""How long the next block after an announcement is waited for."""


@dataclass(frozen=True, slots=True)
class ClaimOffer:
    """What a claim would do, for people to read before they agree."""

    standing: StandingOutcome
    """The outcome as it stands."""
    ruling: Ruling
    """What the claimant says it should be."""
    terms: CourtTerms
    bench: int
    """Jurors that could sit on the case."""
    balance_wei: int
    """What the claimant's wallet holds."""
    gas_wei: int
    """What gas costs at most, in the chain's coin."""
    has_case: bool
    """Whether somebody claimed about the outcome before."""

    @property
    def recorded(self) -> Ruling:
        """What is recorded."""
        return Ruling(self.standing.outcome.verdict, self.standing.outcome.reason)

    def require(self, now: int) -> None:
        """Raise ConfigError when the claim cannot be made."""
        if self.ruling.is_same(self.recorded):
            raise ConfigError(
                f"the outcome is recorded as {self.recorded} already",
                hint="a claim is for another ruling: see --ruling",
            )
        if not self.has_case and now >= self.standing.closes_at:
            raise ConfigError(
                f"the challenge window closed at {format_time(self.standing.closes_at)}",
                hint=HINTS["CourtWindowClosed"],
            )
        if self.bench == 0:
            raise ConfigError(
                "nobody of the network's bench may judge a case of this run",
                hint="muster juror join puts an account there; see muster run show",
            )
        if self.balance_wei < self.terms.bond:
            raise ConfigError(
                f"the bond is {format_tokens(self.terms.bond)} tokens, the wallet holds "
                f"{format_tokens(self.balance_wei)}",
                hint="send tokens to it, or claim from another account: any may",
            )

    def describe(self) -> str:
        """Return what the claim costs, what it is about and until when it is possible."""
        record, terms = self.standing.outcome, self.terms
        return (
            f"outcome {self.recorded} of worker {record.worker_id}, step {record.step}, "
            f"index {record.index}, {record.units} units\n"
            f"claim   {self.ruling}\n"
            f"bond    {format_tokens(terms.bond)} of {format_tokens(self.balance_wei)} tokens; "
            "lost unless the jury finds the same, else given back\n"
            f"jury    {min(terms.jury_size, self.bench)} of the {self.bench} that may sit\n"
            f"gas     {format_coins(self.gas_wei)} of the chain's coin at most\n"
            f"open    until {format_time(self.standing.closes_at)}; the case takes "
            f"{format_duration(terms.jury_time)} at most"
        )


def parse_ruling(text: str | None, recorded: Ruling) -> Ruling:
    """Return the ruling that a text means: a verdict, or VERDICT:REASON; without one the opposite
    of what is recorded. Raises ConfigError when the text is not a ruling.
    """
    if text is None:
        if recorded.verdict is Verdict.ACCEPTED:
            return Ruling(Verdict.REJECTED, Reason.TOPLOC_MISMATCH)
        return Ruling(Verdict.ACCEPTED, Reason.NONE)
    verdict, _, reason = text.partition(":")
    default = Reason.NONE if verdict.lower() == "accepted" else Reason.TOPLOC_MISMATCH
    try:
        return Ruling(
            Verdict[verdict.upper()],
            Reason[reason.upper().replace("-", "_")] if reason else default,
        )
    except KeyError as error:
        raise ConfigError(
            f"{text} is no ruling",
            hint="one of accepted, incomplete, rejected, fraud, with a reason behind a colon, as "
            "fraud:wrong_reward",
        ) from error


# Chain


async def make_offer(
    chain: Chain, view: ChainView, claimant: Address, place: SubmissionPlace, ruling: str | None
) -> ClaimOffer:
    """Return what a claim would do; raises ConfigError when it cannot be made."""
    gas = await gas_money(chain, "dispute")
    standing = await explained(chain.ledger.standing_of(proof_of(place)))
    recorded = Ruling(standing.outcome.verdict, standing.outcome.reason)
    worker = view.worker_by_id.get(standing.outcome.worker_id)
    run = view.runs[place.batch.run_id]
    case = view.cases.get(standing.leaf)
    offer = ClaimOffer(
        standing=standing,
        ruling=parse_ruling(ruling, recorded),
        terms=await chain.court.terms(),
        bench=len(eligible_jurors(view, run, worker.address if worker else None)),
        balance_wei=await chain.token.balance_of(claimant),
        gas_wei=gas.wei,
        has_case=case is not None and not case.closed,
    )
    offer.require(await chain.now())
    await require_gas(chain, claimant, "dispute", gas)
    return offer


def proof_of(place: SubmissionPlace) -> OutcomeProof:
    """Return a judged outcome with its proof; raises ConfigError when nobody judged it."""
    if place.batch.records is None:
        raise ConfigError(
            f"nobody has judged batch {place.batch.batch_id}",
            hint="there is no verdict to dispute; its worker calls judges of the network once it "
            "is due: muster worker submit-direct",
        )
    return place.batch.prove(place.position)


async def claim(
    chain: Chain,
    proof: OutcomeProof,
    entry: BatchEntry,
    ruling: Ruling,
    sources: Sequence[str],
    *,
    key: bytes,
    patience_s: float = BLOCK_PATIENCE_S,
) -> Receipt:
    """Announce a claim, make it in a later block, and return its receipt; approves the bond."""
    await chain.allow("DisputeCourt", (await chain.court.terms()).bond)
    leaf = (await chain.ledger.standing_of(proof)).leaf
    salt = _salt(key, leaf, ruling)
    await chain.court.announce(claim_announcement(chain.me, leaf, ruling, salt))
    return await _in_a_later_block(
        lambda: chain.court.claim(
            proof,
            entry.submission,
            entry.signature,
            ruling.number,
            salt,
            list(sources)[:MAX_SOURCES],
        ),
        patience_s,
    )


async def _in_a_later_block(make: Callable[[], Any], patience_s: float) -> Receipt:
    """Make a claim, again until the block after its announcement is there."""
    async with asyncio.timeout(patience_s):
        while True:
            try:
                receipt: Receipt = await explained(make())
                return receipt
            except ContractRevert as error:
                if error.name != "CourtNotAnnounced":
                    raise
            await asyncio.sleep(0.5)


def _salt(key: bytes, leaf: Hash32, ruling: Ruling) -> Hash32:
    """Return the salt that hides a claim; it follows from the key, so it is the same every time."""
    message = b"muster.claim" + leaf + ruling.number.to_bytes(2, "big")
    return Hash32(hmac.digest(key, message, "sha256"))


def case_id_of(place: SubmissionPlace) -> Hash32:
    """Return the name that the case about a submission has."""
    batch = place.batch
    if batch.records is None:
        return summons_of(batch.batch_id)
    return batch.records[place.position].leaf(batch.batch_id, place.position)


async def find_entry(place: SubmissionPlace, case: CaseView | None, sources: Sources) -> BatchEntry:
    """Return a submission with its proofs from the chain, where it has them, else from a source;
    raises ApiError when no source shows it.
    """
    from muster.client.chain_facts import entry_of

    batch = place.batch
    if batch.work is not None:
        return entry_of(batch.work, batch.committed_at)
    if case is not None and case.claims:
        made = case.claims[0]
        entry = await sources.work(made.submission.leaf())
        # The chain has seen the node's signature; a source may show anything.
        return entry.model_copy(update={"signature": made.node_signature})
    return (await sources.batch(batch.batch_id, batch.root, batch.count))[place.position]


T = TypeVar("T")

HINTS = {
    "CourtWindowClosed": "the outcome is final: nothing can change it any more",
    "CourtNoOpenCase": "see muster dispute list for cases that are open",
    "CourtPhaseOpen": "the jury has time left: muster dispute list shows until when",
    "CourtPhaseOver": "the jury is about to decide: no claim joins the case any more",
    "CourtMayNotClaim": "jurors of the bench claim nothing that they could judge: use another "
    "account",
    "CourtNoJurors": "nobody of the bench may sit on this case: muster run show counts them",
    "LedgerNotJudged": "nobody judged it: its worker calls judges, muster worker submit-direct",
}
"""What to do next about a refusal of the court or the ledger."""
OVERTAKEN = frozenset({"CourtNoOpenCase", "CourtNothingDue", "VaultOffenceSettled"})
"""Refusals that say somebody else was first."""
POLL_S = 1.0
"""Pause between two looks at a case."""


async def explained(call: Awaitable[T]) -> T:
    """Return what a call returns; a refusal says what to do next."""
    try:
        return await call
    except ContractRevert as error:
        error.hint = HINTS.get(error.name, error.hint)
        raise


@dataclass(frozen=True, slots=True)
class Settled:
    """What settling a case did."""

    closed_tx: str | None = None
    """The transaction that closed it, if it was ours."""
    fined: dict[str, str] = field(default_factory=dict)
    """By account: the transaction that fined it."""
    collected: dict[str, str] = field(default_factory=dict)
    """By juror: the transaction that paid its fee."""
    refused: dict[str, str] = field(default_factory=dict)
    """By account: why it could not be fined."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "closed": self.closed_tx,
            "fined": self.fined,
            "collected": self.collected,
            "refused": self.refused,
        }


async def close_case(chain: Chain, view: ChainView, case: CaseView) -> Receipt:
    """Settle a case on chain whose jury has finished, or whose time is over."""
    batch = view.batches[case.batch_id]
    if case.is_summons:
        return await chain.court.settle_summoned(batch.header(), case.claims[0].submission)
    return await chain.court.settle(batch.prove(case.position))


async def fine(chain: Chain, view: ChainView, case: CaseView, penalty: Penalty) -> Receipt:
    """Fine an account at fault in a closed case."""
    if penalty.offence is Offence.ABSENT_JUROR:
        return await chain.court.fine_absent_juror(case.case_id, penalty.account)
    proof = view.batches[case.batch_id].prove(case.position)
    return await chain.court.fine_signer(proof, penalty.account)


async def settle(
    chain: Chain, read: Callable[[], Awaitable[ChainView]], case_id: Hash32
) -> Settled:
    """Close a case unless it is closed, fine whom it finds at fault, and pay its jurors.

    Raises ContractRevert while the jury has time left.
    """
    closed_tx, view = None, await read()
    if not view.cases[case_id].closed:
        closed_tx = await _close(chain, view, case_id)
        view = await read()
    case, settled = view.cases[case_id], Settled(closed_tx)
    for penalty in penalties_of(view, case):
        try:
            settled.fined[penalty.account] = (await fine(chain, view, case, penalty)).tx_hash
        except ContractRevert as error:
            if error.name not in OVERTAKEN:
                settled.refused[penalty.account] = str(error)
    for juror in fees_due(case):
        try:
            receipt = await chain.court.collect_fee(case_id, juror)
            settled.collected[juror] = receipt.tx_hash
        except ContractRevert as error:
            if error.name not in OVERTAKEN:
                raise
    return settled


async def _close(chain: Chain, view: ChainView, case_id: Hash32) -> str | None:
    try:
        return (await explained(close_case(chain, view, view.cases[case_id]))).tx_hash
    except ContractRevert as error:
        if error.name in OVERTAKEN:
            return None
        raise


async def until_decided(
    chain: Chain,
    read: Callable[[], Any],
    case_id: Hash32,
    terms: CourtTerms,
    say: Callable[[str], None],
) -> None:
    """Report the progress of a case until it is closed, or until anybody can close it.

    Jurors close it as soon as they can, so the first few looks leave it to them.
    """
    said, started, left_alone = "", time.monotonic(), 0
    first = await chain.now()
    while True:
        case = (await read()).cases[case_id]
        now = max(await chain.now(), first + time.monotonic() - started)
        words = ending_of(case) if case.closed else _progress(case, terms, now)
        if words != said:
            said = words
            say(words)
        left_alone += phase_of(case, terms, now)[0] == "to settle"
        if case.closed or left_alone > 3:
            return
        await asyncio.sleep(POLL_S)


def _progress(case: CaseView, terms: CourtTerms, now: float) -> str:
    phase, _ = phase_of(case, terms, now)
    if phase == "to settle":
        return "the jury is done"
    return f"{phase}: {next_of(case, terms, now)}"


def describe_settled(settled: Settled) -> list[str]:
    """Return what settling did as lines for people."""
    lines = [f"settled the case, {settled.closed_tx}"] if settled.closed_tx else []
    lines += [f"fined {who}, {tx}" for who, tx in settled.fined.items()]
    lines += [f"paid juror {who}, {tx}" for who, tx in settled.collected.items()]
    lines += [f"could not fine {who}: {why}" for who, why in settled.refused.items()]
    return lines or ["nothing was left to do: the case is closed, nobody is left to fine or pay"]
