"""The machines that get work: the recipe's demands, the nodes' reports, and measured speed.

A report is signed, so a node answers for it, but it proves nothing. Measured time counts: the first
tickets of a worker are its challenge, whichever nodes it has. A worker that claims units which it
did not generate is slashed, so units per second between lease and upload cannot be made up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.dialects.postgresql import insert

from muster.orchestrator.db.database import Database
from muster.orchestrator.db.query import Query, Rows, Statement
from muster.orchestrator.db.tables import hardware
from muster.orchestrator.http.errors import refuse
from muster.orchestrator.leases.allowance import Past
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import EncodingError, SignatureError
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import HardwareReport
from muster.protocol.recipe import HardwareRecipe

CHALLENGES = 3
"""Tickets by the best of which a machine is measured: one may fall into a bad moment."""
RETEST_S = 3600
"""A machine that was too slow gets another ticket after this time."""
_row = insert(hardware).values({each.name: bindparam(each.name) for each in hardware.c})
_KEEP = Query(
    _row.on_conflict_do_update(
        index_elements=["node"],
        set_={name: _row.excluded[name] for name in ("report", "signature", "report_hash")},
    )
)
_ALL = Query(select(hardware.c.node, hardware.c.report))()


class Unfit(StrEnum):
    """Why a machine gets no ticket."""

    UNKNOWN = "hardware_unknown"
    """It has not said what it has."""
    SHORT = "hardware_short"
    """It says it has less than the run asks for."""
    SLOW = "too_slow"
    """It was slower on its last tickets than the run asks for."""


@dataclass(frozen=True, slots=True)
class Timed:
    """How a ticket went."""

    units: int
    """Units uploaded for it; 0 for nothing."""
    seconds: int
    """Seconds of the chain's clock from lease to upload, or to the deadline."""
    ended_at: int
    """Chain time of the upload, or the deadline."""

    @property
    def units_per_s(self) -> float:
        """What it achieved; the chain's clock counts whole seconds."""
        return self.units / max(self.seconds, 1)


def is_short(report: HardwareReport, asked: HardwareRecipe) -> bool:
    """Return whether a machine says it has less than is asked for."""
    return report.memory_mb < asked.min_memory_mb or report.gpu_memory_mb < asked.min_gpu_memory_mb


def is_slow(timed: list[Timed], asked: HardwareRecipe, now: int) -> bool:
    """Return whether a machine failed its challenge, and its time to try again has not come."""
    if len(timed) < CHALLENGES or not asked.min_units_per_s:
        return False
    best = max(each.units_per_s for each in timed)
    latest = max(each.ended_at for each in timed)
    return best < asked.min_units_per_s and now < latest + RETEST_S


class Hardware:
    """The reports of all nodes, and what the run asks for. Bounded by the registered nodes."""

    def __init__(
        self,
        database: Database,
        asked: HardwareRecipe,
        *,
        run_id: RunId,
        domain: Domain,
        lease_s: int,
    ) -> None:
        self._database = database
        self._asked = asked
        self._asks = asked != HardwareRecipe()
        self._run_id = run_id
        self._domain = domain
        self._lease_s = lease_s
        self._reports: dict[Address, HardwareReport] = {}

    @property
    def reports(self) -> Mapping[Address, HardwareReport]:
        """What each node last said."""
        return self._reports

    async def load(self) -> None:
        """Read what was said before the start."""
        [rows] = await self._database.search(_ALL)
        for node, report in rows:
            self._reports[Address(node)] = HardwareReport.from_json(json.loads(report))

    def note(self, node: Address, said: dict[str, Any], signature: bytes) -> Statement:
        """Remember a node's report; returns the row to write. Refuses what it did not sign."""
        try:
            report = HardwareReport.from_json(said)
            signer = recover(digest(self._domain, report.struct_hash()), signature)
        except (EncodingError, SignatureError) as error:
            raise refuse("bad_hardware_report", str(error)) from error
        if (signer, report.node, report.run_id) != (node, node, self._run_id):
            raise refuse("bad_hardware_report", "the report is another node's, or for another run")
        self._reports[node] = report
        return _KEEP(
            node=node,
            report=json.dumps(report.to_json()),
            signature=signature,
            report_hash=report.struct_hash(),
        )

    def wants(self, node: Address) -> bool:
        """Return whether the run asks something of machines, and this one has said nothing."""
        return self._asks and node not in self._reports

    def fault(self, node: Address, reports: Rows, past: Sequence[Past], now: int) -> Unfit | None:
        """Return why a node's machine gets no ticket, or None; from what the database has of it and
        its worker's last tickets, oldest first.
        """
        if not self._asks:
            return None
        report = self._reports.get(node)
        if report is None and reports:
            # It told another replica.
            report = self._reports[node] = HardwareReport.from_json(json.loads(reports[0][0]))
        if report is None:
            return Unfit.UNKNOWN
        if is_short(report, self._asked):
            return Unfit.SHORT
        timed = [self._time(each) for each in past if each.is_over(now)]
        return Unfit.SLOW if is_slow(timed[-CHALLENGES:], self._asked, now) else None

    def _time(self, past: Past) -> Timed:
        ended_at = past.deadline if past.received_at is None else past.received_at
        return Timed(past.units or 0, ended_at - (past.deadline - self._lease_s), ended_at)
