"""A claim that an outcome is wrong, from its offer to the end of its case.

A claim is first announced as a hash, and made in a later block, so that nobody can copy it first.
Its salt is derived from the claimant's key, so a command that was killed in between can resume.
Anybody may settle a case and fine those at fault; jurors' programs and `muster dispute settle` do
it.
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
    ClaimView,
    CourtTerms,
    OutcomeProof,
    Receipt,
    StandingOutcome,
    SubmissionPlace,
)
from muster.chain.structs import CommittedWork, Offence
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
from muster.protocol.errors import ApiError, ChainUnreachable, ConfigError, ContractRevert
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import Ruling, claim_announcement, is_same, summons_of
from muster.protocol.merkle import batch_proof
from muster.protocol.messages import Reason, Verdict

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.client.sources import Sources


BLOCK_PATIENCE_S = 120.0
"""Seconds to wait for the next block after an announcement."""


@dataclass(frozen=True, slots=True)
class ClaimOffer:
    """The terms of a claim, shown before its confirmation."""

    standing: StandingOutcome
    """The outcome as it stands."""
    ruling: Ruling
    """The ruling that the claimant demands."""
    terms: CourtTerms
    bench: int
    """Jurors that could sit on the case."""
    balance_wei: int
    """Tokens in the claimant's wallet, in wei."""
    gas_wei: int
    """Highest cost of gas, in wei of the chain's coin."""
    has_case: bool
    """Whether there is already a case about the outcome."""

    @property
    def recorded(self) -> Ruling:
        """The recorded ruling."""
        return Ruling(self.standing.outcome.verdict, self.standing.outcome.reason)

    def require(self, now: int) -> None:
        """Raise ConfigError when the claim cannot be made."""
        if self.ruling.is_same(self.recorded):
            raise ConfigError(
                f"the outcome is recorded as {self.recorded} already",
                hint="claim another outcome with --ruling",
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
                hint="send tokens to the wallet, or claim from another account: any account may",
            )

    def describe(self) -> str:
        """Return the subject, cost and deadline of the claim."""
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
    """Return the ruling in a text: a verdict, or VERDICT:REASON; without a text the opposite of the
    recorded one. Raises ConfigError when the text is not a ruling.
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
            hint="write accepted, incomplete, rejected or fraud, with a reason after a "
            "colon: fraud:wrong_reward",
        ) from error


# Chain


async def make_offer(
    chain: Chain, view: ChainView, claimant: Address, place: SubmissionPlace, ruling: str | None
) -> ClaimOffer:
    """Return the terms of a claim; raises ConfigError when it cannot be made."""
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
    """Return an outcome with its proof; raises ConfigError when the submission is not judged."""
    if place.batch.records is None:
        raise ConfigError(
            f"nobody has judged batch {place.batch.batch_id}",
            hint="there is no verdict to dispute yet; when outcomes are overdue, its worker "
            "can call jurors of the network: muster worker submit-direct",
        )
    return place.batch.prove(place.position)


async def claim(
    chain: Chain,
    proof: OutcomeProof,
    work: CommittedWork,
    ruling: Ruling,
    sources: Sequence[str],
    *,
    key: bytes,
    patience_s: float = BLOCK_PATIENCE_S,
) -> Receipt:
    """Announce a claim, make it in a later block, and return its receipt; approves the bond."""
    from muster.client.sources import named_sources

    await chain.allow("DisputeCourt", (await chain.court.terms()).bond)
    leaf = (await chain.ledger.standing_of(proof)).leaf
    salt = _salt(key, leaf, ruling)
    await chain.court.announce(claim_announcement(chain.me, leaf, ruling, salt))
    return await _in_a_later_block(
        lambda: chain.court.claim(
            proof,
            work,
            ruling.number,
            salt,
            named_sources(sources),
        ),
        patience_s,
    )


async def _in_a_later_block(make: Callable[[], Any], patience_s: float) -> Receipt:
    """Make a claim, with retries until the block after its announcement exists.

    Raises ChainUnreachable when no block comes.
    """
    ends_s = time.monotonic() + patience_s
    while True:
        try:
            receipt: Receipt = await explained(make())
            return receipt
        except ContractRevert as error:
            if error.name != "CourtNotAnnounced":
                raise
            # Only this wait ends: a claim that is on its way pays a bond.
            if time.monotonic() >= ends_s:
                raise ChainUnreachable(
                    f"the chain made no block in {patience_s:g} s after the claim was announced",
                    hint="run the same command again once the chain makes blocks",
                ) from error
        await asyncio.sleep(0.5)


def _salt(key: bytes, leaf: Hash32, ruling: Ruling) -> Hash32:
    """Return the salt that hides a claim; it is derived from the key, so it is always the same."""
    message = b"muster.claim" + leaf + ruling.number.to_bytes(2, "big")
    return Hash32(hmac.digest(key, message, "sha256"))


def earlier_claim(case: CaseView | None, claimant: Address, text: str | None) -> ClaimView | None:
    """Return the claim that an account has made in a case for the ruling in a text."""
    recorded = Ruling.of(case.recorded) if case else None
    if case is None or recorded is None:
        return None
    wanted = parse_ruling(text, recorded).number
    own = (made for made in case.claims if made.claimant == claimant)
    return next((made for made in own if is_same(made.ruling, wanted)), None)


def case_id_of(place: SubmissionPlace) -> Hash32:
    """Return the id of the case about a submission."""
    batch = place.batch
    if batch.records is None:
        return summons_of(batch.batch_id)
    return batch.records[place.position].leaf(batch.batch_id, place.position)


async def find_entry(
    place: SubmissionPlace, case: CaseView | None, sources: Sources
) -> tuple[BatchEntry, Sequence[Hash32]]:
    """Return a submission with its signatures and ticket, and its proof in the batch, from the
    chain if it has them, else from a source; the proof is empty where only the record names the
    work. Raises ApiError when no source has it.
    """
    from muster.client.chain_facts import entry_of

    batch = place.batch
    if batch.work is not None:
        return entry_of(batch.work, batch.committed_at), ()
    made = batch.claim_about(case) if case is not None and case.claims else None
    if made is None or not batch.is_proven(made, place.position):
        try:
            entries = await sources.batch(batch.batch_id, batch.root, batch.count)
        except ApiError:
            if made is None:
                raise
        else:
            leaves = [entry.submission.leaf() for entry in entries]
            return entries[place.position], batch_proof(leaves, place.position)
    assert made is not None  # else the batch is shown, or it raised
    entry = await sources.work(made.submission.leaf())
    # The chain has verified that a key of the worker's signed; a source may be wrong.
    return entry.model_copy(update={"signature": made.node_signature}), made.proof


T = TypeVar("T")

HINTS = {
    "CourtWindowClosed": "the outcome is final: nothing can change it any more",
    "CourtNoOpenCase": "see muster dispute list for cases that are open",
    "CourtPhaseOpen": "the jury has time left: muster dispute list shows until when",
    "CourtPhaseOver": "the jury is about to decide: no claim joins the case any more",
    "CourtMayNotClaim": (
        "a juror of the bench cannot claim about a case that it could judge: use another account; "
        "or the case has its 16 claims, and only its worker may add one"
    ),
    "CourtUnproven": (
        "another claim proved what the batch holds, and this one shows something else or no proof: "
        "name a source that shows the batch"
    ),
    "CourtNoJurors": "nobody of the bench may sit on this case: muster run show counts them",
    "LedgerNotJudged": "nobody judged it: its worker calls judges, muster worker submit-direct",
    "LedgerInvalidSubmission": (
        "the source shows a wrong signature: name another one; or the record names other work than "
        "the batch holds: muster audit run --evidence FILES --report reports its signers"
    ),
}
"""Hints for errors of the court or the ledger."""
OVERTAKEN = frozenset({"CourtNoOpenCase", "CourtNothingDue", "VaultOffenceSettled"})
"""Contract errors that mean somebody else was first."""
POLL_S = 1.0
"""Seconds between two polls of a case."""


async def explained(call: Awaitable[T]) -> T:
    """Return the result of a call; a contract error gets a hint."""
    try:
        return await call
    except ContractRevert as error:
        error.hint = HINTS.get(error.name, error.hint)
        raise


@dataclass(frozen=True, slots=True)
class Settled:
    """Effects of settling a case."""

    closed_tx: str | None = None
    """Our transaction that closed the case, if any."""
    fined: dict[str, str] = field(default_factory=dict)
    """Transactions of fines, by account."""
    collected: dict[str, str] = field(default_factory=dict)
    """Transactions of fees, by juror."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons why an account could not be fined."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "closed": self.closed_tx,
            "fined": self.fined,
            "collected": self.collected,
            "refused": self.refused,
        }


async def close_case(chain: Chain, view: ChainView, case: CaseView) -> Receipt:
    """Settle a case on chain, after its jury has finished or its time is over."""
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
    """Close a case if it is open, fine those at fault, and pay its jurors.

    Raises ContractRevert while the jury has time left.
    """
    closed_tx, view = None, await read()
    if not view.cases[case_id].closed:
        closed_tx = await _close(chain, view, case_id)
        view = await read()
    case, settled = view.cases[case_id], Settled(closed_tx)
    for penalty in penalties_of(view, case, await chain.court.terms()):
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

    Jurors close it as soon as they can, so the first few polls leave it to them.
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
    done = "nothing was left to do in the case: it is closed, nobody is left to fine or pay"
    return lines or [done]
