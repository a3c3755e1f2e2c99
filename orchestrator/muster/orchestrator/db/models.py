"""The tables. Hashes and signatures are blobs, addresses checksummed text, times Unix seconds."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    UniqueConstraint,
    select,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from muster.chain import BatchView
from muster.protocol.messages import Submission

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Declarative base; constraint names are fixed so that migrations can name them."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        bytes: LargeBinary,
        dict[str, Any]: JSON,
        # SQLite numbers rows by itself in a column of this very type, and stores 64 bits in it.
        int: BigInteger().with_variant(Integer, "sqlite"),
    }


def _where(condition: str) -> dict[str, Any]:
    """Return what makes an index of those rows only that meet a condition."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


class IdentityRow(Base):
    """Whose database this is: one row."""

    __tablename__ = "identity"

    run_id: Mapped[int] = mapped_column(primary_key=True)
    """The run."""
    chain_id: Mapped[int]
    """Its chain."""
    ledger: Mapped[str]
    """Its ContributionLedger."""
    created_at: Mapped[int]
    """Wall clock at creation: requests signed earlier have no remembered nonces and are refused."""
    is_unfunded: Mapped[bool] = mapped_column(default=False)
    """Whether the run could not pay for the batch that was to be committed last."""


class LeaseRow(Base):
    """A ticket that was handed out."""

    __tablename__ = "leases"
    __table_args__ = (
        UniqueConstraint("worker", "step", "index"),
        Index(None, "deadline"),
        Index(None, "node", "deadline"),
        Index(None, "policy_version", "is_filled", "deadline"),
        Index("ix_leases_unfilled", "worker", "deadline", **_where("is_filled = false")),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    """Order of leasing."""
    node: Mapped[str]
    """The node that asked."""
    worker: Mapped[str]
    """Its worker."""
    step: Mapped[int]
    """Rollout step of the slot."""
    index: Mapped[int]
    """Number of the slot."""
    deadline: Mapped[int]
    """Chain time after which an upload is late."""
    ticket: Mapped[dict[str, Any]]
    """The ticket in its JSON form."""
    signature: Mapped[bytes]
    """EIP-712 `Ticket` by the orchestrator."""
    is_filled: Mapped[bool] = mapped_column(default=False)
    """Whether its submission was received."""
    policy_version: Mapped[int]
    """The ticket's policy version."""


class BatchRow(Base):
    """A batch's composition, recorded before it is committed."""

    __tablename__ = "batches"

    root: Mapped[bytes] = mapped_column(primary_key=True)
    """Merkle root over its submissions."""
    count: Mapped[int]
    """Submissions."""
    units: Mapped[int]
    """Units they claim."""
    is_judged: Mapped[bool] = mapped_column(default=False, index=True)
    """Whether its outcomes are on chain; false for some time after they are."""


class SubmissionRow(Base):
    """A received submission."""

    __tablename__ = "submissions"
    __table_args__ = (
        UniqueConstraint("worker", "step", "index"),
        Index(None, "batch_root", "position"),
        Index(None, "has_file", "sequence"),
        Index(None, "worker", "sequence"),
        Index(None, "step", "sequence"),
        Index(None, "leaf"),
        Index("ix_submissions_waiting", "worker", **_where("batch_root IS NULL")),
    )

    sequence: Mapped[int] = mapped_column(primary_key=True)
    """Order of upload."""
    file_hash: Mapped[bytes] = mapped_column(unique=True)
    """SHA-256 of its file; the submission's id."""
    worker: Mapped[str]
    """The worker."""
    step: Mapped[int]
    """Rollout step of the slot."""
    index: Mapped[int]
    """Number of the slot."""
    units: Mapped[int]
    """Units it claims."""
    leaf: Mapped[bytes | None]
    """The submission's leaf; None of what an earlier release received."""
    submission: Mapped[dict[str, Any]]
    """The signed claim in its JSON form."""
    signature: Mapped[bytes]
    """EIP-712 `Submission` by the node."""
    ticket: Mapped[dict[str, Any]]
    """The ticket in its JSON form."""
    ticket_signature: Mapped[bytes]
    """EIP-712 `Ticket` by the orchestrator."""
    received_at: Mapped[int]
    """Chain time at which the upload was complete."""
    size_bytes: Mapped[int]
    """Size of its file."""
    has_file: Mapped[bool] = mapped_column(default=True)
    """Whether its file is still kept."""
    batch_root: Mapped[bytes | None] = mapped_column(ForeignKey("batches.root"))
    """The batch it was put into."""
    position: Mapped[int | None]
    """Its place in that batch."""


class OutcomesRow(Base):
    """One validator's signed outcomes of one batch."""

    __tablename__ = "outcomes"

    batch_id: Mapped[int] = mapped_column(primary_key=True)
    """The batch."""
    validator: Mapped[str] = mapped_column(primary_key=True)
    """Who signed."""
    records: Mapped[bytes]
    """The packed records."""
    signature: Mapped[bytes]
    """EIP-712 `Outcomes`."""
    received_at: Mapped[int] = mapped_column(default=0)
    """Chain time at which they were received; 0 when that was lost with a database."""
    batch_root: Mapped[bytes | None]
    """The root that the batch had; None of what an earlier release received."""

    def is_of(self, batch: BatchView) -> bool:
        """Return whether they are of this batch, not of one that a reorganisation replaced."""
        return self.batch_root in (None, batch.root)


class DoubleRow(Base):
    """What somebody signed beside something else, of which it may sign one."""

    __tablename__ = "doubles"

    offence: Mapped[str] = mapped_column(primary_key=True)
    """Two submissions, or two outcomes, by the contracts' name."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    """The worker or the validator."""
    tag: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The slot as `step << 32 | index`, or the batch."""
    signed: Mapped[dict[str, Any]]
    """Both outcomes, or the second submission, with signatures, in JSON form."""


class NonceRow(Base):
    """A nonce that was used; remembered for NONCE_LIFE_S."""

    __tablename__ = "nonces"

    signer: Mapped[str] = mapped_column(primary_key=True)
    """Who signed with it."""
    nonce: Mapped[bytes] = mapped_column(primary_key=True)
    """The nonce."""
    seen_at: Mapped[int] = mapped_column(index=True)
    """Wall clock at its use."""


class HeartbeatRow(Base):
    """The latest sign of life of a node."""

    __tablename__ = "heartbeats"

    node: Mapped[str] = mapped_column(primary_key=True)
    """The node."""
    policy_version: Mapped[int | None]
    """The policy it has loaded."""
    state: Mapped[str]
    """What it does, in its own words."""
    software: Mapped[str]
    """Its software and version, in its own words."""
    seen_at: Mapped[int]
    """Wall clock."""
    count: Mapped[int]
    """Heartbeats received."""


class HardwareRow(Base):
    """What a node last said its machine has."""

    __tablename__ = "hardware"

    node: Mapped[str] = mapped_column(primary_key=True)
    """The node."""
    report: Mapped[str]
    """Its report, as JSON text."""
    signature: Mapped[bytes]
    """EIP-712 `HardwareReport` by the node."""
    report_hash: Mapped[bytes]
    """The report's EIP-712 struct hash."""


class CheckingRow(Base):
    """A validator's proof that it recomputed a batch."""

    __tablename__ = "checkings"

    batch_id: Mapped[int] = mapped_column(primary_key=True)
    """The batch."""
    validator: Mapped[str] = mapped_column(primary_key=True)
    """Who."""
    batch_root: Mapped[bytes]
    """The root that the batch had."""
    records_hash: Mapped[bytes]
    """Keccak-256 of the outcomes it goes with."""
    fingerprints_hash: Mapped[bytes]
    """What it committed to."""
    signature: Mapped[bytes]
    """EIP-712 `Checking`."""
    committed_at: Mapped[int]
    """Wall clock."""
    fingerprints: Mapped[bytes | None]
    """Packed, once shown."""
    revealed_at: Mapped[int | None]
    """Wall clock, once shown."""


class CheckReportRow(Base):
    """What a validator found about another's fingerprints of a batch."""

    __tablename__ = "check_reports"

    batch_id: Mapped[int] = mapped_column(primary_key=True)
    """The batch."""
    validator: Mapped[str] = mapped_column(primary_key=True)
    """Whose fingerprints."""
    reporter: Mapped[str] = mapped_column(primary_key=True)
    """Who compared them."""
    compared: Mapped[int]
    """Submissions compared."""
    failed: Mapped[int]
    """Those whose fingerprints come from no recomputation."""
    signature: Mapped[bytes]
    """EIP-712 `CheckReport` by the reporter."""
    reported_at: Mapped[int]
    """Wall clock."""


class MetricsRow(Base):
    """The trainer's figures of one step."""

    __tablename__ = "metrics"

    step: Mapped[int] = mapped_column(primary_key=True)
    """Training step, or policy version evaluated."""
    figures: Mapped[dict[str, Any]]
    """Name to number."""
    revision: Mapped[int] = mapped_column(index=True)
    """Grows with every report, over all steps."""


def lease_of(submission: Submission) -> Select[LeaseRow]:
    """Return the query for the lease whose ticket a submission fills."""
    return select(LeaseRow).where(
        LeaseRow.worker == submission.worker,
        LeaseRow.step == submission.step,
        LeaseRow.index == submission.index,
    )
