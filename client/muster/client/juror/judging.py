"""From a case to a ruling: what sources show of the work, recomputed with the run's own checks.

Nothing that a source shows is believed: documents, files and policies have their hashes on chain,
tickets and submissions their signatures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from muster.api import BatchEntry
from muster.chain import BatchView, CaseView, RunView
from muster.client.chain_facts import HistoryView, OutcomePlace, entry_of
from muster.client.disputes.rerun import Rerun, claim_of, measure_conduct, recompute
from muster.client.documents import TASK_SETS, read_rules
from muster.client.sources import Signer, Sources
from muster.client.validator.batches import is_misdeclared
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import MISDECLARED, Rules, outcome_record
from muster.client.validator.records import counted_before, judge_again
from muster.inference import InferenceEngine
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Verdict
from muster.shardcast import Fetcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _CaseAt:
    """The work of a case, and who shows it."""

    run: RunView
    batch: BatchView
    position: int
    rules: Rules
    sources: Sources


@dataclass
class CaseJudge:
    """Judges one case after the other, of any run; its engine holds one policy."""

    view: HistoryView
    """The chain, kept current by someone else."""
    key: bytes
    """The juror's key: orchestrators show files to jurors that sign."""
    domain: Domain
    """Of the ContributionLedger."""
    engine: InferenceEngine
    """What prefills."""
    decoder: FileDecoder
    """What parses files."""
    folder: Path
    """Where documents and policies are kept."""
    sources: Sequence[str] = ()
    """Its own sources, asked before those that a case names."""
    relays: Sequence[str] = ()
    """Its own relays."""
    allows_private: bool = False
    """Whether strangers' sources may lead into this machine's network: on a devnet."""
    transport: httpx.AsyncBaseTransport | None = None
    """Carries the questions to sources; None for the network."""
    _rules: dict[RunId, Rules] = field(default_factory=dict)
    _loaded: tuple[RunId, PolicyVersion, Hash32] | None = None

    async def judge(self, case: CaseView) -> tuple[Ruling, dict[str, Any]]:
        """Return the ruling on a case's work, and what was recomputed.

        Raises MusterError while something is missing.
        """
        run, batch = self.view.runs[case.run_id], self.view.batches[case.batch_id]
        named = [url for claim in case.claims for url in claim.sources]
        signer = Signer(self.key, self.domain, run.config.orchestrator)
        async with Sources(
            self.sources,
            named=[*batch.sources, *named],
            allows_private=self.allows_private,
            signer=signer,
            transport=self.transport,
        ) as sources:
            rules = await self._read_rules(run, sources)
            case_at = _CaseAt(run, batch, case.position, rules, sources)
            recorded = batch.records[case.position].reason if batch.records else None
            if recorded is Reason.BATCH_MISDECLARED:
                found = await self._among_all(case_at)
            else:
                found = await self._recompute(case_at, await self._entry(batch, case, sources))
                if recorded is Reason.SAMPLER_DRIFT:
                    found = await self._with_history(case_at, found)
        return Ruling(found.record.verdict, found.record.reason), _described(found)

    async def _read_rules(self, run: RunView, sources: Sources) -> Rules:
        if run.run_id not in self._rules:
            folder = self.folder / TASK_SETS
            self._rules[run.run_id] = await read_rules(sources, run.config, folder)
        return self._rules[run.run_id]

    async def _entry(self, batch: BatchView, case: CaseView, sources: Sources) -> BatchEntry:
        """Return the work of a case with all its proofs."""
        if batch.work is not None:
            return entry_of(batch.work, batch.committed_at)
        submission = case.claims[0].submission

        def accepts(entry: BatchEntry) -> bool:
            """Whoever shows another ticket, or none, does not make the work worse than it is."""
            return (
                entry.ticket is not None
                and entry.ticket_signature is not None
                and signer_of(self.domain, entry.ticket, entry.ticket_signature)
                == batch.orchestrator
            )

        entry = await sources.work(submission.leaf(), accepts)
        # The chain has seen the node's signature; of those that a source shows none is needed.
        signed = next((c.node_signature for c in case.claims if c.node_signature), entry.signature)
        return entry.model_copy(update={"signature": signed})

    async def _recompute(self, at: _CaseAt, entry: BatchEntry) -> Rerun:
        claim = claim_of(self.view, at.batch, entry, at.position, self.domain)
        data = await at.sources.file(entry.submission.file_hash)
        await self._load(at.run, entry.submission.policy_version, at.sources)
        return await recompute(claim, data, at.rules, self.engine, self.decoder)

    async def _among_all(self, at: _CaseAt) -> Rerun:
        """Return the outcome that follows from the whole batch: it was refused as a whole."""
        batch = at.batch
        entries = await at.sources.batch(batch.batch_id, batch.root, batch.count)
        entry = entries[at.position]
        found = await self._recompute(at, entry)
        if not is_misdeclared(batch, [each.submission for each in entries]):
            return found
        claim = claim_of(self.view, batch, entry, at.position, self.domain)
        return replace(found, record=outcome_record(claim, MISDECLARED))

    async def _with_history(self, at: _CaseAt, alone: Rerun) -> Rerun:
        """Return the outcome of a submission in the light of its worker's earlier ones."""
        if alone.record.verdict is not Verdict.ACCEPTED:
            return alone
        batches, place = self.view.batches, OutcomePlace(at.batch.batch_id, at.position)
        counted = [record for _, record in counted_before(batches, at.run, place)]
        conducts = []
        for record in (*counted, alone.record):
            data = await at.sources.file(record.file_hash)
            await self._load(at.run, record.policy_version, at.sources)
            conducts.append(await measure_conduct(data, at.rules, self.engine, self.decoder))
        record, detail = judge_again(batches, place, alone.record, conducts, at.rules.calibration)
        return replace(alone, record=record, detail=detail)

    async def _load(self, run: RunView, version: PolicyVersion, sources: Sources) -> None:
        """Load the policy that the work claims, if it was ever published."""
        checkpoint = run.checkpoints.get(version)
        if checkpoint is None:
            return
        wanted = (run.run_id, version, checkpoint.manifest_root)
        if self._loaded == wanted:
            return
        relays = await self._find_relays(run.run_id, sources)
        async with Fetcher(relays, self.folder / "policies", attempts=3) as fetcher:
            folder = await fetcher.fetch(*wanted)
        # A load that fails leaves the engine without any policy.
        self._loaded = None
        await asyncio.to_thread(self.engine.load_policy, folder, version)
        self._loaded = wanted

    async def _find_relays(self, run_id: RunId, sources: Sources) -> list[str]:
        """Return its own relays, those that orchestrators among the sources name, and the sources:
        relays are sources, too.
        """
        asked = await asyncio.gather(*(sources.run_info(run_id, url) for url in sources.urls))
        named = [url for info in asked if info for url in (*info.relays, info.origin)]
        return list(dict.fromkeys([*self.relays, *named, *sources.urls]))


def _described(found: Rerun) -> dict[str, Any]:
    """Return what was recomputed as JSON values; no measurement that machines differ in."""
    record = found.record
    return {
        "file_hash": hex0x(record.file_hash),
        "verdict": record.verdict.name,
        "reason": record.reason.name,
        "detail": found.detail,
        "units": record.units,
        "record": hex0x(record.to_bytes()),
    }
