"""The trainer's figures by step, kept only for display."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import bindparam, func, literal_column, select

from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Query, Statement, latest_row
from muster.orchestrator.db.tables import metrics
from muster.orchestrator.intake.files import FileStore
from muster.protocol.ids import Address

SIGNED_BY = "eval_by"
"""Name under which the signer of an evaluation is stored beside its figures."""

_NEWER = Query(
    select(metrics.c.step, metrics.c.figures, metrics.c.revision)
    .where(metrics.c.revision > bindparam("revision"))
    .order_by(metrics.c.step)
)
_NEXT = Query(
    select(func.coalesce(func.max(metrics.c.revision), literal_column("-1")) + literal_column("1"))
)()
_OF_STEP = Query(select(metrics.c.figures).where(metrics.c.step == bindparam("step")))
_KEEP = latest_row(metrics)


def keep_figures(step: int, figures: Mapping[str, float | str], revision: int) -> Statement:
    """Return the statement that stores a step's figures and replaces earlier ones."""
    return _KEEP(step=step, figures=json.dumps(figures), revision=revision)


class TrainingMetrics:
    """Figures per step; several reports of a step are merged."""

    def __init__(
        self,
        database: Database,
        files: FileStore,
        *,
        on_figures: Callable[[int, Mapping[str, float]], None],
        on_received: Callable[[], None],
    ) -> None:
        """`on_figures` is called with every step's figures, also those read at the start."""
        self._database = database
        self._files = files
        self._on_figures = on_figures
        self._on_received = on_received
        self._figures: dict[int, dict[str, float]] = {}
        self._revision = -1
        self.evaluators: dict[int, Address] = {}
        """Signer of each version's evaluation."""
        self.reports = 0
        """Reports received since the start; results computed from figures are stale when it
        changes."""

    async def load(self) -> None:
        """Read figures reported before the start, or to other replicas since the last call."""
        [rows] = await self._database.search(_NEWER(revision=self._revision))
        for step, figures, revision in rows:
            self._take(step, json.loads(figures), revision)
        if rows:
            self._on_received()

    async def report(
        self, step: int, figures: Mapping[str, float], *, signer: Address | None = None
    ) -> None:
        """Store the figures of a step; for an evaluation, also its signer."""
        reported: dict[str, float | str] = dict(figures)
        if signer is not None and "eval_reward" in figures:
            reported[SIGNED_BY] = signer
        await self._files.keep_metrics(step, reported)
        async with self._database.transaction() as asked:
            [(revision,)], known = await asked.ask(_NEXT, _OF_STEP(step=step))
            merged = {**(json.loads(known[0][0]) if known else {}), **reported}
            await asked.ask(keep_figures(step, merged, revision))
        self._take(step, merged, revision)
        self._on_received()

    def column(self, name: str) -> dict[int, float]:
        """Return one figure by step, unordered."""
        return {s: f[name] for s, f in self._figures.items() if name in f}

    def at(self, step: int) -> Mapping[str, float]:
        """Return the figures of a step."""
        return self._figures.get(step, {})

    def latest(self, name: str) -> float | None:
        """Return a figure of the newest step that has it."""
        series = self.series(name)
        return series[-1][1] if series else None

    def _take(self, step: int, kept: Mapping[str, Any], revision: int) -> None:
        if SIGNED_BY in kept:
            self.evaluators[step] = Address(kept[SIGNED_BY])
        figures = {name: value for name, value in kept.items() if name != SIGNED_BY}
        self._figures[step] = figures
        self._revision = max(self._revision, revision)
        self.reports += 1
        self._on_figures(step, figures)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return one figure by step, ascending."""
        return [(s, f[name]) for s, f in sorted(self._figures.items()) if name in f]
