"""Proofs of checking, held against what was recomputed: who signed an outcome without checking it.

A validator's fingerprints are its signed word, so it does not matter who shows them: a file
`checking-<batch>.json` of the evidence, which is an orchestrator's answer about the batch, or the
orchestrator asked now. What nobody shows is a note: no rule says that it must be kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pydantic import ValidationError

from muster.api import BatchChecking, OrchestratorApi
from muster.chain import BatchView, RunView
from muster.client.audit.contradictions import MAX_LISTED, Check, Contradiction, Kind, summarise
from muster.client.audit.evidence import EvidenceStore
from muster.client.validator.checking import (
    Fingerprints,
    Proof,
    shown_fingerprints,
    who_checked,
)
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address
from muster.protocol.messages import Verdict


class ProofBook:
    """Compares what a run's validators show with what was recomputed, and adds up."""

    def __init__(
        self, run: RunView, domain: Domain, store: EvidenceStore, orchestrator: str | None = None
    ) -> None:
        """`domain` is the ledger's; `orchestrator` is asked for what `store` does not have."""
        self._run, self._domain = run, domain
        self._store, self._orchestrator = store, orchestrator
        self._known: dict[int, BatchChecking | None] = {}
        self._found: list[Contradiction] = []
        self._counts: Counter[Proof] = Counter()
        # In order, each once.
        self._notes: dict[str, None] = {}

    async def wanted(self, batch: BatchView) -> list[Address]:
        """Return whose fingerprints of a batch are to be recomputed: those of who signed or
        committed to some; nobody's where none are to be had.
        """
        checking = await self._checking(batch)
        if checking is None:
            return []
        committed = {each.validator for each in checking.commitments} & set(self._run.seats)
        return sorted(committed | self._signers(batch))

    async def compare(self, batch: BatchView, position: int, recomputed: Fingerprints) -> None:
        """Take in what the fingerprints of an accepted submission must be; of others there need be
        none.
        """
        checking = await self._checking(batch)
        if checking is None or not batch.records:
            return
        if batch.records[position].verdict is not Verdict.ACCEPTED:
            return
        expected = {who: of for who, of in recomputed.items() if of}
        for who, proof in who_checked(checking, batch, position, expected, self._domain).items():
            self._counts[proof] += 1
            if proof is Proof.UNCHECKED:
                what = f"{who} signed without recomputing it: its fingerprints come from other "
                what += f"hidden states{self._copied(checking, batch, position, who)}"
                self._contradict(Kind.OUTCOME_UNCHECKED, batch, position, what)
            elif proof is Proof.NONE:
                self._unproven(checking, batch, who)

    def check(self) -> Check | None:
        """Return what came of it; None when nothing could be compared."""
        if not self._counts and not self._found:
            return None
        summary = (
            f"{self._counts[Proof.CHECKED]} proofs borne out, {self._counts[Proof.NONE]} not shown"
        )
        check = summarise("who signed accepted outcomes had recomputed them", self._found, summary)
        return replace(check, notes=tuple(self._notes)[:MAX_LISTED])

    async def _checking(self, batch: BatchView) -> BatchChecking | None:
        """Return what validators committed to and showed of a batch; None when nobody has it."""
        if batch.batch_id not in self._known:
            found = self._kept(batch) or await self._asked(batch)
            self._known[batch.batch_id] = found
            if found is None:
                self._notes[f"batch {batch.batch_id}: nobody shows proofs of checking"] = None
        return self._known[batch.batch_id]

    def _kept(self, batch: BatchView) -> BatchChecking | None:
        for name, data in self._store.checkings(batch.batch_id):
            try:
                found = BatchChecking.model_validate_json(data)
            except (ValidationError, RecursionError):
                what = f"{name} of the evidence is malformed"
                self._contradict(Kind.EVIDENCE_ALTERED, batch, None, what)
                continue
            if found.batch_root == batch.root:
                return found
        return None

    async def _asked(self, batch: BatchView) -> BatchChecking | None:
        if self._orchestrator is None:
            return None
        try:
            async with OrchestratorApi(self._orchestrator) as api:
                found = await api.checking(batch.batch_id)
        except ApiError:
            return None
        return found if found.batch_root == batch.root else None

    def _unproven(self, checking: BatchChecking, batch: BatchView, who: Address) -> None:
        """Note that a signer shows no proof; what is shown and not its own was altered."""
        of = next((each for each in checking.commitments if each.validator == who), None)
        if of is not None and of.fingerprints is not None and of.records_hash == batch.records_hash:
            what = f"the fingerprints kept as {who}'s are not those that it signed"
            if all(what != each.detail for each in self._found if each.batch_id == batch.batch_id):
                self._contradict(Kind.EVIDENCE_ALTERED, batch, None, what)
        elif who in self._signers(batch):
            says = "committed to no fingerprints" if of is None else "shows no fingerprints of it"
            self._notes[f"batch {batch.batch_id}: {who} signed and {says}"] = None

    def _copied(
        self, checking: BatchChecking, batch: BatchView, position: int, who: Address
    ) -> str:
        """Return who else shows the same fingerprints, in words; empty when nobody does."""
        shown = {
            each.validator: parts[position]
            for each in checking.commitments
            if (parts := shown_fingerprints(checking, each.validator, batch, self._domain))
        }
        mine = shown.pop(who)
        others = [other for other, of in shown.items() if of == mine]
        return f", the same as {others[0]} shows" if others else ""

    def _signers(self, batch: BatchView) -> set[Address]:
        return {who for who, bit in self._run.seats.items() if bit & batch.signers}

    def _contradict(self, kind: Kind, batch: BatchView, position: int | None, what: str) -> None:
        at = (batch.posted_tx, batch.posted_block, batch.batch_id, position)
        self._found.append(Contradiction(kind, what, *at))
