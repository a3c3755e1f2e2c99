"""What validators handed in about batches, from a copy of the evidence: signed, so anybody's copy.

An orchestrator keeps every validator's outcomes beside the files, those that were outvoted too:
`outcomes/<batch>-<validator>.json`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from muster.api.answers import AccountAddress, HexBytes, HexHash, HexSignature
from muster.chain import BatchView
from muster.client.audit.calls import LEAST_TIMEOUT_S, borne_out_by_statements
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.evidence import EvidenceStore
from muster.client.audit.history import History
from muster.client.audit.observed import parameter
from muster.client.audit.table import tabulate
from muster.client.audit.work import recovered
from muster.protocol.eip712 import Domain, digest
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import Outcomes


class KeptOutcomes(BaseModel):
    """One validator's outcomes of one batch, as an orchestrator keeps them."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)

    batch_id: int
    """The batch."""
    root: HexHash
    """The root it was committed with: a local chain that starts over uses its number again."""
    validator: AccountAddress
    """Who signed."""
    records: HexBytes
    """The packed records."""
    signature: HexSignature
    """EIP-712 `Outcomes`."""

    def is_signed(self, domain: Domain) -> bool:
        """Return whether its validator signed it; `domain` is the ledger's."""
        message = Outcomes(self.batch_id, self.root, keccak(self.records))
        return recovered(digest(domain, message.struct_hash()), self.signature) == self.validator


def check_statements(
    history: History, run_id: RunId, store: EvidenceStore, timeout_s: int | None
) -> Iterator[Check]:
    """Yield whether a copy's outcomes are signed, and whether they called who signed on chain;
    nothing when the copy has none. `timeout_s` is the patience that the orchestrator says it has.
    """
    found: list[Contradiction] = []
    statements: dict[int, dict[Address, Hash32]] = {}
    for batch in history.ledger.batches.values():
        if batch.run_id == run_id and batch.records:
            statements[batch.batch_id] = {}
            for kept in kept_outcomes(store, batch, found):
                if kept.is_signed(history.domain):
                    statements[batch.batch_id][kept.validator] = keccak(kept.records)
                else:
                    what = f"{kept.validator} did not sign the outcomes kept as its own"
                    found.append(_altered(batch, what))
    count = sum(map(len, statements.values()))
    if not count and not found:
        return
    name = "the outcomes that were kept are their validators'"
    yield summarise(name, found, f"{count} signatures recovered")
    yield borne_out_by_statements(
        history.ledger,
        tabulate(history.ledger, only=statements),
        parameter(history.deployment, history.observed, "outcome_deadline_s"),
        statements,
        timeout_s=timeout_s or LEAST_TIMEOUT_S,
    )


def kept_outcomes(
    store: EvidenceStore, batch: BatchView, found: list[Contradiction]
) -> Iterator[KeptOutcomes]:
    """Yield what is kept about a batch; what cannot be read is added to `found`."""
    for name, data in store.outcomes(batch.batch_id):
        try:
            kept = KeptOutcomes.model_validate_json(data)
        except (ValidationError, RecursionError):
            found.append(_altered(batch, f"{name} of the evidence is malformed"))
            continue
        if (kept.batch_id, kept.root) == (batch.batch_id, batch.root):
            yield kept


def _altered(batch: BatchView, what: str) -> Contradiction:
    return Contradiction(
        Kind.EVIDENCE_ALTERED,
        what,
        tx=batch.posted_tx,
        block=batch.posted_block,
        batch_id=batch.batch_id,
    )
