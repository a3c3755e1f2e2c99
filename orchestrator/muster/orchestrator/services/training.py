"""The trainer's figures, by step: what the reward curve is drawn from, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import func, select

from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import MetricsRow
from muster.orchestrator.services.files import FileStore

MAX_STEPS = 100_000
"""Steps kept; a run is shorter."""


class TrainingMetrics:
    """Figures per step; the same step's are merged."""

    def __init__(
        self,
        database: Database,
        files: FileStore,
        *,
        on_figures: Callable[[int, Mapping[str, float]], None],
        on_received: Callable[[], None],
    ) -> None:
        """`on_figures` is told of every step's figures, those read at start included."""
        self._database = database
        self._files = files
        self._on_figures = on_figures
        self._on_received = on_received
        self._figures: dict[int, dict[str, float]] = {}
        self._revision = -1
        self.reports = 0
        """Reports received since the start: what is made of figures is stale when it changed."""

    async def load(self) -> None:
        """Read what was reported before the start, or to other replicas since the last time."""
        newer = select(MetricsRow).where(MetricsRow.revision > self._revision)
        async with self._database.read() as session:
            rows = (await session.scalars(newer.order_by(MetricsRow.step))).all()
        for row in rows:
            self._take(row)
        if rows:
            self._on_received()

    async def report(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a step."""
        await self._files.keep_metrics(step, dict(figures))
        async with self._database.write() as session:
            newest = await session.scalar(select(func.max(MetricsRow.revision)))
            known = await session.get(MetricsRow, step)
            merged = {**(known.figures if known else {}), **figures}
            row = MetricsRow(
                step=step, figures=merged, revision=0 if newest is None else newest + 1
            )
            await session.merge(row)
        self._take(row)
        self._on_received()

    def column(self, name: str) -> dict[int, float]:
        """Return one figure by step, in no order."""
        return {s: f[name] for s, f in self._figures.items() if name in f}

    def at(self, step: int) -> Mapping[str, float]:
        """Return the figures of a step."""
        return self._figures.get(step, {})

    def latest(self, name: str) -> float | None:
        """Return a figure of the newest step that has it."""
        series = self.series(name)
        return series[-1][1] if series else None

    def _take(self, row: MetricsRow) -> None:
        self._figures[row.step] = dict(row.figures)
        self._revision = max(self._revision, row.revision)
        self.reports += 1
        self._on_figures(row.step, row.figures)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return one figure by step, ascending."""
        return [(s, f[name]) for s, f in sorted(self._figures.items()) if name in f]
