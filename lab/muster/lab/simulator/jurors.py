"""The bench: jurors run the production duty, and judge with the checks that validators use."""

from __future__ import annotations

import asyncio
from typing import Any

from muster.chain import CaseView
from muster.client.chain_facts import HistoryView
from muster.client.disputes.rerun import claim_of, recompute
from muster.client.juror.duty import JurorDuty
from muster.client.validator.judging import Rules
from muster.lab.simulator.connection import domain_of
from muster.lab.simulator.desk import SimulatedApi
from muster.lab.simulator.machines import InlineDecoder, SimulatedEngine
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Verdict

PURCHASED = Ruling(Verdict.FRAUD, Reason.TOPLOC_MISMATCH)
"""What a dishonest juror votes, whatever it sees."""


class SimulatedJudge:
    """Judges a case with what the run's orchestrator shows."""

    def __init__(
        self, api: SimulatedApi, view: HistoryView, rules: Rules, *, seconds: float, conduct: str
    ) -> None:
        self._api, self._view, self._rules = api, view, rules
        self._seconds, self._conduct = seconds, conduct

    async def judge(self, case: CaseView) -> tuple[Ruling, dict[str, Any]]:
        """Return what it finds; raises ApiError while the orchestrator does not answer."""
        if self._conduct == "purchased":
            return PURCHASED, {}
        contents = await self._api.batch(case.batch_id)
        entry = contents.submissions[case.position]
        data = await self._api.file(entry.submission.file_hash)
        await asyncio.sleep(self._seconds)
        engine = SimulatedEngine()
        engine.policy_version = entry.submission.policy_version
        batch = self._view.batches[case.batch_id]
        claim = claim_of(self._view, batch, entry, case.position, domain_of("ContributionLedger"))
        found = await recompute(claim, data, self._rules, engine, InlineDecoder())  # type: ignore[arg-type]
        return Ruling(found.record.verdict, found.record.reason), {"detail": found.detail}


class SimulatedJuror(JurorDuty):
    """A juror's program, which can be killed."""

    async def on_change(self, _events: object) -> None:
        """Look at nothing: it looks by itself."""

    def close(self) -> None:
        """Let go of the journal."""
        self.place.journal.close()
