"""What checks of an audit are made of, and what they are made on: the posted outcomes.

Pure, as all of the audit but its command: a view in, checks out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.chain import BatchView, ChainView, Deployment, Funds, StakeAccount
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

SHOWN_PROBLEMS = 5
"""Problems that a check's detail spells out."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was recomputed."""

    name: str
    """What must hold."""
    passed: bool
    """Whether it does."""
    detail: str
    """What was compared, or what disagrees."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What the contracts themselves say at the audited block, to compare sums with."""

    vault_wei: int
    """Tokens of StakeVault."""
    escrow_wei: int
    """Tokens of RewardEscrow."""
    stakes: Mapping[Address, StakeAccount]
    """Stake of every account that the events tell of, and of every validator."""
    runs: int
    """Runs of RunRegistry."""
    batches: int
    """Batches of ContributionLedger."""
    funds: Mapping[RunId, Funds] = field(default_factory=dict)
    """Money of each run the events tell of."""
    versions: Mapping[RunId, PolicyVersion | None] = field(default_factory=dict)
    """Newest policy version of each."""
    strange: frozenset[int] = frozenset()
    """Batches whose header is not the one that the events add up to."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A posted outcome."""

    batch: BatchView
    """Its batch."""
    position: int
    """Its place there."""
    record: OutcomeRecord
    """The record."""
    verdict: Verdict
    """The verdict that stands after disputes."""


def judged_outcomes(view: ChainView, run_id: RunId | None = None) -> Iterator[Judged]:
    """Yield every posted outcome, of one run or of all, in the order of commitment."""
    for batch in view.batches.values():
        if run_id in (None, batch.run_id):
            for position, record in enumerate(batch.records or ()):
                verdict = view.standing_verdict(batch.batch_id, position) or record.verdict
                yield Judged(batch, position, record, verdict)


def summarise(name: str, problems: Iterable[str], summary: str) -> Check:
    """Return a check that passes without problems, and otherwise says the first of them."""
    found = list(problems)
    if not found:
        return Check(name, True, summary)
    more = len(found) - SHOWN_PROBLEMS
    detail = "; ".join(found[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    return Check(name, False, detail)


def parameter(deployment: Deployment, name: str) -> int | None:
    """Return a number that the deployment records, None when it does not."""
    value = deployment.parameters.get(name)
    return int(value) if value is not None else None
