"""Frauds that stand: whose stake each costs, and whether it was taken. Pure."""

import math
from typing import NamedTuple

from muster.chain.doubles import tag_of
from muster.chain.structs import Offence
from muster.chain.view import ChainView
from muster.chain.view_parts import SlashView
from muster.protocol.ids import Address, RunId
from muster.protocol.jury import is_exact
from muster.protocol.messages import Verdict


class Charge(NamedTuple):
    """An offence in a run; it costs stake once, whatever batches hold its slot."""

    owner: Address
    """The account whose stake it costs."""
    offence: Offence
    """A fraud or an exact fraud."""
    tag: int
    """The slot: `step << 32 | index`."""


def charge_of(
    view: ChainView, batch_id: int, position: int, *, commit_time_s: int | None = None
) -> Charge | None:
    """Return the charge of an outcome that stands as fraud, else None.

    None also where the ledger takes no stake: the record names no worker, or a jury found the fraud
    and no claim proved what the batch holds. Only claims in the first half of the time to commit
    prove it; without `commit_time_s`, claims at any time count.
    """
    if view.standing_verdict(batch_id, position) is not Verdict.FRAUD:
        return None
    batch = view.batches[batch_id]
    record = (batch.records or ())[position]
    case = view.cases.get(record.leaf(batch_id, position))
    if case is None or not case.overturned:
        worker = view.worker_by_id.get(record.worker_id)
        offence = _offence_of(Verdict.FRAUD << 8 | record.reason)
        slot = record.step << 32 | record.index
        return None if worker is None else Charge(worker.address, offence, slot)
    until = math.inf if commit_time_s is None else case.opened_at + commit_time_s // 2
    if not batch.is_proven_in(case, before=until):
        return None
    about = batch.claim_about(case).submission
    return Charge(about.worker, _offence_of(case.ruling), tag_of(about))


def _offence_of(ruling: int) -> Offence:
    return Offence.EXACT_FRAUD if is_exact(ruling) else Offence.FRAUD


def slash_for(view: ChainView, run_id: RunId, charge: Charge) -> SlashView | None:
    """Return the slash of a run for a charge; None while its stake was not taken."""
    found = (s for s in view.slashes if s.run_id == run_id)
    return next((s for s in found if (s.owner, s.offence, s.tag) == charge), None)


def awaits_execution(
    view: ChainView, batch_id: int, position: int, *, commit_time_s: int | None = None
) -> bool:
    """Return whether an outcome is a fraud whose stake anybody can take, unless slashing is paused;
    `commit_time_s` is as in `charge_of`.
    """
    charge = charge_of(view, batch_id, position, commit_time_s=commit_time_s)
    return charge is not None and slash_for(view, view.batches[batch_id].run_id, charge) is None
