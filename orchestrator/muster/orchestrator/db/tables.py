"""The tables. Hashes and signatures are bytes, addresses checksummed text, times Unix seconds.

They are created in an empty database and never migrated: a release with other tables (`VERSION`)
needs an empty database, which is rebuilt from the chain and the files folder.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.schema import CreateIndex, CreateTable

from muster.orchestrator.db.query import DIALECTS, Statement, plain

VERSION = 3
"""Version of the tables; increases with every change."""
metadata = MetaData()

_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


def _key(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _counter(name: str) -> Column[Any]:
    return Column(name, _NUMBER, Identity(), primary_key=True)


def _column(name: str, kind: Any, *constraints: Any, **options: Any) -> Column[Any]:
    return Column(name, kind, *constraints, nullable=False, **options)


def _flag(name: str) -> Column[Any]:
    return _column(name, Boolean(), server_default=false())


# The owner of this database: one row. `deploy_hash` is the hash of the block in which the contracts
# were deployed: a local chain that starts anew has the same ids and addresses. Requests signed
# before `created_at`, the wall clock at creation, are refused: their nonces may be lost.
# `is_unfunded` says whether the run could not pay for a batch when the leader last tried.
identity = Table(
    "identity",
    metadata,
    _key("run_id", _NUMBER),
    _column("chain_id", _NUMBER),
    _column("ledger", Text),
    _column("deploy_hash", LargeBinary),
    _column("created_at", _NUMBER),
    _flag("is_unfunded"),
)

# Tickets that were given out, in order of `id`. `ticket` is the JSON form, `deadline` the chain
# time after which an upload is late.
leases = Table(
    "leases",
    metadata,
    _counter("id"),
    _column("node", Text),
    _column("worker", Text),
    _column("step", _NUMBER),
    _column("index", _NUMBER),
    _column("deadline", _NUMBER),
    _column("ticket", Text),
    _column("signature", LargeBinary),
    _flag("is_filled"),
    _column("policy_version", _NUMBER),
    UniqueConstraint("worker", "step", "index"),
)

# Compositions of batches, written before they are committed. `is_judged` says whether the outcomes
# are on chain; it is false for some time after they are.
batches = Table(
    "batches",
    metadata,
    _key("root", LargeBinary),
    _column("count", _NUMBER),
    _column("units", _NUMBER),
    _flag("is_judged"),
)

# Received submissions, in order of upload. `submission` and `ticket` are JSON, `received_at` is the
# chain time at which the upload was complete, `position` the place in the batch.
submissions = Table(
    "submissions",
    metadata,
    _counter("sequence"),
    _column("file_hash", LargeBinary, unique=True),
    _column("worker", Text),
    _column("step", _NUMBER),
    _column("index", _NUMBER),
    _column("units", _NUMBER),
    _column("leaf", LargeBinary),
    _column("submission", Text),
    _column("signature", LargeBinary),
    _column("ticket", Text),
    _column("ticket_signature", LargeBinary),
    _column("received_at", _NUMBER),
    _column("size_bytes", _NUMBER),
    _column("has_file", Boolean(), server_default=true()),
    Column("batch_root", LargeBinary, ForeignKey(batches.c.root)),
    Column("position", _NUMBER),
    UniqueConstraint("worker", "step", "index"),
)

# A validator's signed outcomes of a batch. `received_at` is chain time, 0 when it was lost with a
# database; `batch_root` distinguishes batches that got the same number after a reorganisation.
outcomes = Table(
    "outcomes",
    metadata,
    _key("batch_id", _NUMBER),
    _key("validator", Text),
    _column("records", LargeBinary),
    _column("signature", LargeBinary),
    _column("received_at", _NUMBER, server_default=text("0")),
    _column("batch_root", LargeBinary),
)

# Second signatures by someone who may sign only once. `tag` is the slot as `step << 32 | index`, or
# the batch; `signed` is JSON.
doubles = Table(
    "doubles",
    metadata,
    _key("offence", Text),
    _key("owner", Text),
    _key("tag", _NUMBER),
    _column("signed", Text),
)

# Used nonces, kept for NONCE_LIFE_S.
nonces = Table(
    "nonces",
    metadata,
    _key("signer", Text),
    _key("nonce", LargeBinary),
    _column("seen_at", _NUMBER),
)

# The latest heartbeat of every node, as the node reported it.
heartbeats = Table(
    "heartbeats",
    metadata,
    _key("node", Text),
    Column("policy_version", _NUMBER),
    _column("state", Text),
    _column("software", Text),
    _column("seen_at", _NUMBER),
    _column("count", _NUMBER),
)

# A node's last signed report about its machine: JSON, with its EIP-712 struct hash.
hardware = Table(
    "hardware",
    metadata,
    _key("node", Text),
    _column("report", Text),
    _column("signature", LargeBinary),
    _column("report_hash", LargeBinary),
)

# A validator's proof that it recomputed a batch: the commitment sent with its outcomes, and the
# packed fingerprints once revealed. Times are wall clock.
checkings = Table(
    "checkings",
    metadata,
    _key("batch_id", _NUMBER),
    _key("validator", Text),
    _column("batch_root", LargeBinary),
    _column("records_hash", LargeBinary),
    _column("fingerprints_hash", LargeBinary),
    _column("signature", LargeBinary),
    _column("committed_at", _NUMBER),
    Column("fingerprints", LargeBinary),
    Column("revealed_at", _NUMBER),
)

# One validator's report on another's fingerprints of a batch: the number of submissions compared,
# and of those whose fingerprints come from no recomputation.
check_reports = Table(
    "check_reports",
    metadata,
    _key("batch_id", _NUMBER),
    _key("validator", Text),
    _key("reporter", Text),
    _column("compared", _NUMBER),
    _column("failed", _NUMBER),
    _column("signature", LargeBinary),
    _column("reported_at", _NUMBER),
)

# The trainer's figures of a step: JSON, name to number. `revision` grows with every report.
metrics = Table(
    "metrics",
    metadata,
    _key("step", _NUMBER),
    _column("figures", Text),
    _column("revision", _NUMBER),
)

IS_UNFILLED, IS_WAITING = ~leases.c.is_filled, submissions.c.batch_root.is_(None)
"""Conditions of partial indexes. Statements use these very expressions, or SQLite would not use the
indexes."""
INDEXES = (
    Index("ix_leases_deadline", leases.c.deadline),
    Index("ix_leases_worker_deadline", leases.c.worker, leases.c.deadline),
    Index("ix_leases_open", leases.c.policy_version, leases.c.is_filled, leases.c.deadline),
    Index(
        "ix_leases_unfilled",
        *(leases.c.worker, leases.c.deadline),
        sqlite_where=IS_UNFILLED,
        postgresql_where=IS_UNFILLED,
    ),
    Index("ix_batches_is_judged", batches.c.is_judged),
    Index("ix_submissions_batch_root_position", submissions.c.batch_root, submissions.c.position),
    Index("ix_submissions_has_file_sequence", submissions.c.has_file, submissions.c.sequence),
    Index("ix_submissions_worker_sequence", submissions.c.worker, submissions.c.sequence),
    Index("ix_submissions_step_sequence", submissions.c.step, submissions.c.sequence),
    Index("ix_submissions_leaf", submissions.c.leaf),
    Index(
        "ix_submissions_waiting",
        submissions.c.worker,
        sqlite_where=IS_WAITING,
        postgresql_where=IS_WAITING,
    ),
    Index("ix_nonces_seen_at", nonces.c.seen_at),
    Index("ix_metrics_revision", metrics.c.revision),
)
"""The order of creation matters: of two equally good indexes SQLite uses the later one."""
SCHEMA_VERSION = (
    plain("CREATE TABLE IF NOT EXISTS schema_version (number INTEGER)"),
    plain("SELECT number FROM schema_version"),
)
"""Create the version table if necessary and read it; an empty database returns no row."""


def creation(kind: str) -> list[Statement]:
    """Return the statements that create the tables in one of the `DIALECTS`."""
    dialect = DIALECTS[kind]
    made = [str(CreateTable(table).compile(dialect=dialect)) for table in metadata.sorted_tables]
    made += [str(CreateIndex(index).compile(dialect=dialect)) for index in INDEXES]
    return [plain(sql) for sql in (*made, f"INSERT INTO schema_version VALUES ({VERSION})")]
