"""What replicas that share a database must tell each other, and 64 bits for every number."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NUMBERS = {
    "identity": ("run_id", "chain_id", "created_at"),
    "leases": ("id", "step", "index", "deadline"),
    "batches": ("count", "units"),
    "submissions": ("sequence", "step", "index", "received_at", "size_bytes", "position"),
    "outcomes": ("batch_id",),
    "nonces": ("seen_at",),
    "heartbeats": ("policy_version", "seen_at", "count"),
    "metrics": ("step",),
}


def upgrade() -> None:
    """Add the columns."""
    _resize("BIGINT")
    op.add_column(
        "identity", sa.Column("is_unfunded", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.add_column(
        "batches", sa.Column("is_judged", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.create_index(op.f("ix_batches_is_judged"), "batches", ["is_judged"])
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("metrics", sa.Column("revision", number, nullable=False, server_default="0"))
    op.create_index(op.f("ix_metrics_revision"), "metrics", ["revision"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index(op.f("ix_metrics_revision"), "metrics")
    op.drop_column("metrics", "revision")
    op.drop_index(op.f("ix_batches_is_judged"), "batches")
    op.drop_column("batches", "is_judged")
    op.drop_column("identity", "is_unfunded")
    _resize("INTEGER")


def _resize(kind: str) -> None:
    # SQLite's integers have 64 bits whatever they are called.
    if op.get_bind().dialect.name != "postgresql":
        return
    for table, columns in NUMBERS.items():
        for column in columns:
            op.execute(f'ALTER TABLE {table} ALTER COLUMN "{column}" TYPE {kind}')
