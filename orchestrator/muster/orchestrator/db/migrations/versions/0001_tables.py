"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create them."""
    op.create_table(
        "identity",
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("chain_id", sa.Integer, nullable=False),
        sa.Column("ledger", sa.String, nullable=False),
        sa.Column("created_at", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_identity")),
    )
    _create_work_tables()
    _create_node_tables()


def _create_work_tables() -> None:
    op.create_table(
        "leases",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("node", sa.String, nullable=False),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("deadline", sa.Integer, nullable=False),
        sa.Column("ticket", sa.JSON, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.Column("is_filled", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leases")),
        sa.UniqueConstraint("worker", "step", "index", name=op.f("uq_leases_worker_step_index")),
    )
    op.create_index(op.f("ix_leases_deadline"), "leases", ["deadline"])
    op.create_index(op.f("ix_leases_node_deadline"), "leases", ["node", "deadline"])
    op.create_table(
        "batches",
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("units", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("root", name=op.f("pk_batches")),
    )
    op.create_table(
        "submissions",
        sa.Column("sequence", sa.Integer, nullable=False),
        sa.Column("file_hash", sa.LargeBinary, nullable=False),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("submission", sa.JSON, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.Column("ticket", sa.JSON, nullable=False),
        sa.Column("ticket_signature", sa.LargeBinary, nullable=False),
        sa.Column("received_at", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.Integer, nullable=False),
        sa.Column("batch_root", sa.LargeBinary, nullable=True),
        sa.Column("position", sa.Integer, nullable=True),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_submissions")),
        sa.UniqueConstraint("file_hash", name=op.f("uq_submissions_file_hash")),
        sa.UniqueConstraint(
            "worker", "step", "index", name=op.f("uq_submissions_worker_step_index")
        ),
        sa.ForeignKeyConstraint(
            ["batch_root"], ["batches.root"], name=op.f("fk_submissions_batch_root")
        ),
    )
    op.create_index(
        op.f("ix_submissions_batch_root_position"), "submissions", ["batch_root", "position"]
    )
    op.create_table(
        "outcomes",
        sa.Column("batch_id", sa.Integer, nullable=False),
        sa.Column("validator", sa.String, nullable=False),
        sa.Column("records", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "validator", name=op.f("pk_outcomes")),
    )


def _create_node_tables() -> None:
    op.create_table(
        "nonces",
        sa.Column("signer", sa.String, nullable=False),
        sa.Column("nonce", sa.LargeBinary, nullable=False),
        sa.Column("seen_at", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("signer", "nonce", name=op.f("pk_nonces")),
    )
    op.create_index(op.f("ix_nonces_seen_at"), "nonces", ["seen_at"])
    op.create_table(
        "heartbeats",
        sa.Column("node", sa.String, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("software", sa.String, nullable=False),
        sa.Column("seen_at", sa.Integer, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_heartbeats")),
    )
    op.create_table(
        "metrics",
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("figures", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("step", name=op.f("pk_metrics")),
    )


def downgrade() -> None:
    """Drop them."""
    for table in (
        "metrics",
        "heartbeats",
        "nonces",
        "outcomes",
        "submissions",
        "batches",
        "leases",
        "identity",
    ):
        op.drop_table(table)
