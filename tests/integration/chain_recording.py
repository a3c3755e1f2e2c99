"""A played network as an auditor reads it: its events, its contracts, the command."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from chain_scenario import ORCHESTRATOR, Scenario
from click.testing import CliRunner

from muster.chain import Chain, Event, EventReader, save_deployment
from muster.client.audit.command import audit
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import observe
from muster.client.audit.report import AuditReport, build_report
from muster.protocol.ids import RunId


@dataclasses.dataclass
class Recording:
    """The events of a played network, and the results of its contracts' views."""

    events: list[Event]
    chain: Chain

    async def report(self, events: list[Event] | None = None) -> AuditReport:
        return (await self.reports(events))[0]

    async def reports(self, events: list[Event] | None = None) -> tuple[AuditReport, AuditReport]:
        """Audit everything, and the first run alone."""
        view = Ledger()
        for event in self.events if events is None else events:
            view.apply(event)
        observed, deployment = await observe(self.chain, view), self.chain.deployment
        whole = build_report(view, deployment, observed=observed)
        if (run_id := RunId(1)) not in view.runs:
            return whole, whole
        return whole, build_report(view, deployment, observed=observed, run_id=run_id)


async def record(net: Scenario) -> Recording:
    poll = await EventReader(net.of(ORCHESTRATOR)).poll()
    return Recording(poll.events, net.of(ORCHESTRATOR))


async def run_command(net: Scenario, folder: Path, *flags: str) -> Any:
    save_deployment(folder, net.deployment)
    arguments = ["--rpc", net.anvil.rpc_url, "--deployments", str(folder), *flags]
    return await asyncio.to_thread(CliRunner().invoke, audit, arguments)
