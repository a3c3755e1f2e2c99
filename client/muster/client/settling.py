"""The end of a case: followed until it comes, closed, and everybody at fault punished.

Anybody may do all of this. Validators close cases by themselves and the orchestrator asks for the
punishments; `muster dispute settle` needs neither.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from muster.client.cases import Penalty, ending_of, next_of, penalties_of, phase_of
from muster.protocol.errors import ContractRevert

if TYPE_CHECKING:
    from muster.chain import CaseView, Chain, ChainView, CourtTerms, OutcomeProof
    from muster.protocol.ids import Hash32

T = TypeVar("T")

HINTS = {
    "CourtWindowClosed": "the outcome is final: nothing can change it any more",
    "CourtCaseExists": "an outcome has one case at most: see muster dispute list",
    "CourtNoOpenCase": "see muster dispute list for cases that are open",
    "CourtPhaseOpen": "the jury has time left: muster dispute list shows until when",
    "LedgerOutcomesPending": "outcomes are still awaited: challenge them once they are posted",
}
"""What to do next about a refusal of the court or the ledger."""
_OVERTAKEN = frozenset({"CourtNoOpenCase", "VaultOffenceSettled"})
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
    punished: dict[str, str] = field(default_factory=dict)
    """By validator: the transaction that slashed it."""
    refused: dict[str, str] = field(default_factory=dict)
    """By validator: why it could not be slashed."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"closed": self.closed_tx, "punished": self.punished, "refused": self.refused}


async def settle(
    chain: Chain, read: Callable[[], Awaitable[ChainView]], leaf: Hash32, proof: OutcomeProof
) -> Settled:
    """Close a case unless it is closed, and slash whom it finds at fault.

    Raises ContractRevert while the jury has time left.
    """
    closed_tx = None
    if not (await read()).cases[leaf].closed:
        closed_tx = await _close(chain, proof)
    view = await read()
    settled = Settled(closed_tx)
    for penalty in penalties_of(view, view.cases[leaf]):
        try:
            settled.punished[penalty.validator] = await _punish(chain, leaf, proof, penalty)
        except ContractRevert as error:
            if error.name not in _OVERTAKEN:
                settled.refused[penalty.validator] = str(error)
    return settled


async def _close(chain: Chain, proof: OutcomeProof) -> str | None:
    try:
        return (await explained(chain.court.close(proof))).tx_hash
    except ContractRevert as error:
        if error.name in _OVERTAKEN:
            return None
        raise


async def _punish(chain: Chain, leaf: Hash32, proof: OutcomeProof, penalty: Penalty) -> str:
    from muster.chain import Fault

    if penalty.fault is Fault.WRONG_VERDICT:
        return (await chain.faults.slash_signer(proof, penalty.validator)).tx_hash
    return (await chain.faults.slash_absent_juror(leaf, penalty.validator)).tx_hash


async def until_decided(
    chain: Chain,
    read: Callable[[], Awaitable[ChainView]],
    leaf: Hash32,
    terms: CourtTerms,
    say: Callable[[str], None],
) -> None:
    """Say what happens about a case until it is closed, or can be by anybody.

    Validators close it as soon as they can, so it is left to them for some looks.
    """
    said, started, left_alone = "", time.monotonic(), 0
    first = await chain.now()
    while True:
        case = (await read()).cases[leaf]
        now = max(await chain.now(), first + time.monotonic() - started)
        words = ending_of(case) if case.closed else _progress(case, terms, now)
        if words != said:
            said = words
            say(words)
        left_alone += phase_of(case, terms, now)[0] == "to close"
        if case.closed or left_alone > 3:
            return
        await asyncio.sleep(POLL_S)


def _progress(case: CaseView, terms: CourtTerms, now: float) -> str:
    phase, _ = phase_of(case, terms, now)
    if phase == "to close":
        return "the jury is done"
    return f"{phase}: {next_of(case, terms, now)}"


def describe_settled(settled: Settled) -> list[str]:
    """Return what settling did as lines for people."""
    lines = [f"closed the case, {settled.closed_tx}"] if settled.closed_tx else []
    lines += [f"slashed {who}, {tx}" for who, tx in settled.punished.items()]
    lines += [f"could not slash {who}: {why}" for who, why in settled.refused.items()]
    return lines or ["nothing was left to do: the case is closed, and nobody is left to slash"]
