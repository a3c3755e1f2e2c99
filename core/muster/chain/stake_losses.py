"""Losses by fraud, one line per owner: all slashes of a stake, added up and put into words. Pure.

A fraud that finds no stake left slashes nothing: it is counted, but not listed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from muster.chain.structs import Offence
from muster.chain.view import ChainView
from muster.chain.view_parts import SlashState, SlashView
from muster.protocol.ids import Address, RunId

STATE_WORDS = {
    SlashState.ESCROWED: "held until the verdict is final",
    SlashState.RELEASED: "burned and insured",
    SlashState.RESTORED: "given back",
}
"""State of slashed stake, in words."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of one stake by fraud."""

    run_id: RunId
    """The run that it was staked for; 0 for the jurors' bench."""
    owner: Address
    """Owner of the stake: a worker, a validator or a juror."""
    status: str
    """The worker's status in the run in small letters; empty for others."""
    lost_wei: int
    """Amount taken and not given back."""
    held_wei: int
    """Part of `lost_wei` whose challenge windows are still open."""
    restored_wei: int
    """Amount taken and given back."""
    stake_wei: int
    """The whole stake that could be slashed."""
    reasons: tuple[str, ...]
    """Distinct reasons of the slashes, in chain order."""
    txs: tuple[str, ...]
    """The transactions that took something."""
    empty: int
    """Number of frauds that found nothing left."""

    def to_json(self, tokens: Callable[[int], str]) -> dict[str, Any]:
        """Return it as JSON values: amounts in wei as text, and the line for people."""
        return {
            "lost_wei": str(self.lost_wei),
            "held_wei": str(self.held_wei),
            "restored_wei": str(self.restored_wei),
            "stake_wei": str(self.stake_wei),
            "reasons": list(self.reasons),
            "transactions": list(self.txs),
            "found_nothing": self.empty,
            "words": self.words(tokens),
        }

    def words(self, tokens: Callable[[int], str]) -> str:
        """Return it in one line; `tokens` formats an amount of wei."""
        where = self.where(tokens)
        parts = [
            f"lost {tokens(self.lost_wei)} tokens of {tokens(self.stake_wei)} for "
            f"{', '.join(self.reasons)} ({', '.join(self.txs)})" + (f", {where}" if where else "")
        ]
        if self.empty:
            parts.append(self.later())
        return "; ".join([self.status, *parts] if self.status else parts)

    def where(self, tokens: Callable[[int], str]) -> str:
        """Return where the stake is now, in words; empty when nothing was taken."""
        parts = []
        if self.lost_wei > self.held_wei:
            parts.append(STATE_WORDS[SlashState.RELEASED])
        if self.held_wei:
            some = f"{tokens(self.held_wei)} tokens " if self.lost_wei > self.held_wei else ""
            parts.append(f"{some}{STATE_WORDS[SlashState.ESCROWED]}")
        if self.restored_wei:
            parts.append(f"{tokens(self.restored_wei)} tokens {STATE_WORDS[SlashState.RESTORED]}")
        return ", ".join(parts)

    def later(self) -> str:
        """Return how many frauds found nothing left, in words; empty when none did."""
        frauds = "fraud" if self.empty == 1 else "frauds"
        return f"{self.empty} later {frauds} found nothing left" if self.empty else ""


def losses(view: ChainView, run_id: RunId | None = None) -> list[Loss]:
    """Return the losses of each stake, of one run or of all, in the order of first slashes."""
    by_owner: dict[tuple[RunId, Address], list[SlashView]] = {}
    for slash in view.slashes:
        if run_id in (None, slash.run_id):
            by_owner.setdefault((slash.run_id, slash.owner), []).append(slash)
    return [_loss(view, *key, slashes) for key, slashes in by_owner.items()]


def loss_of(view: ChainView, run_id: RunId, owner: Address) -> Loss | None:
    """Return the loss of one stake; None if it was never slashed."""
    slashes = [s for s in view.slashes if (s.run_id, s.owner) == (run_id, owner)]
    return _loss(view, run_id, owner, slashes) if slashes else None


def _loss(view: ChainView, run_id: RunId, owner: Address, slashes: Sequence[SlashView]) -> Loss:
    taking = [slash for slash in slashes if slash.amount_wei]
    standing = [slash for slash in taking if slash.state is not SlashState.RESTORED]
    member = view.member(run_id, owner)
    return Loss(
        run_id=run_id,
        owner=owner,
        status="" if member is None else member.status.lower(),
        lost_wei=sum(slash.amount_wei for slash in standing),
        held_wei=sum(s.amount_wei for s in standing if s.state is SlashState.ESCROWED),
        restored_wei=sum(s.amount_wei for s in taking if s.state is SlashState.RESTORED),
        stake_wei=_stake(standing or slashes),
        reasons=tuple(dict.fromkeys(reason_of(view, slash) for slash in taking or slashes)),
        txs=tuple(slash.tx_hash for slash in taking or slashes[:1]),
        empty=len(slashes) - len(taking),
    )


def _stake(slashes: Sequence[SlashView]) -> int:
    """Return the whole stake: the part that the last slash found, and the parts taken before."""
    *before, last = slashes
    return sum(slash.amount_wei for slash in before) + sum(last.stake_before)


def reason_of(view: ChainView, slash: SlashView) -> str:
    """Return a slash's reason in small letters; empty if its outcome does not exist."""
    if slash.offence not in (Offence.FRAUD, Offence.EXACT_FRAUD):
        return slash.offence.name.lower()
    batch = view.batches.get(slash.batch_id) if slash.batch_id is not None else None
    if batch is None or slash.position is None:
        return ""
    # A tampered chain may point anywhere.
    of_position = (batch.records or [])[slash.position : slash.position + 1]
    return "".join(record.reason.name.lower() for record in of_position)
