"""The end of a case: followed until it comes, settled, and everybody at fault fined.

Anybody may do all of this. Jurors' programs do it by themselves; `muster dispute settle` needs
none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from muster.chain.structs import Offence
from muster.client.cases import Penalty, ending_of, fees_due, next_of, penalties_of, phase_of
from muster.protocol.errors import ContractRevert

if TYPE_CHECKING:
    from muster.chain import CaseView, Chain, ChainView, CourtTerms, Receipt
    from muster.protocol.ids import Hash32

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
    """Settle a case whose jury is done, or was, on chain."""
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
    """Say what happens about a case until it is closed, or can be by anybody.

    Jurors close it as soon as they can, so it is left to them for some looks.
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
