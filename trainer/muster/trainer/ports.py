"""The trainer's needs of the outside, as protocols; test fakes fit them, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import OutcomeRecord


class StreamItem(Protocol):
    """An accepted record at its place in the training stream."""

    @property
    def position_in_stream(self) -> int:
        """From 0, without gaps."""

    @property
    def record(self) -> OutcomeRecord:
        """The accepted outcome."""


class Ledger(Protocol):
    """The run's accepted records, as far as the chain has been read; grows, shrinks in a reorg."""

    def stream(self) -> Sequence[StreamItem]:
        """Return the training stream."""

    async def changed(self) -> None:
        """Return after the next change."""


class FileSource(Protocol):
    """Hands over submission files; it need not be trusted."""

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return a submission's file; raises ApiError."""


class Anchor(Protocol):
    """The run's published versions on chain, and the right to add one."""

    async def root_of(self, version: PolicyVersion) -> Hash32 | None:
        """Return the manifest root of a published version, None before it is published."""

    async def newest(self) -> PolicyVersion | None:
        """Return the newest published version."""

    async def publish(self, version: PolicyVersion, root: Hash32) -> None:
        """Publish a version; raises ChainError."""


class MetricsSink(Protocol):
    """Somewhere figures are shown."""

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the figures of a step; raises ApiError."""
