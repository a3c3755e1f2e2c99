"""Proofs of checking, and what validators say about each other's."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "checkings",
        sa.Column("batch_id", sa.Integer, nullable=False),
        sa.Column("validator", sa.String, nullable=False),
        sa.Column("batch_root", sa.LargeBinary, nullable=False),
        sa.Column("records_hash", sa.LargeBinary, nullable=False),
        sa.Column("fingerprints_hash", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.Column("committed_at", sa.Integer, nullable=False),
        sa.Column("fingerprints", sa.LargeBinary, nullable=True),
        sa.Column("revealed_at", sa.Integer, nullable=True),
        sa.PrimaryKeyConstraint("batch_id", "validator", name=op.f("pk_checkings")),
    )
    op.create_table(
        "check_reports",
        sa.Column("batch_id", sa.Integer, nullable=False),
        sa.Column("validator", sa.String, nullable=False),
        sa.Column("reporter", sa.String, nullable=False),
        sa.Column("compared", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.Column("reported_at", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "validator", "reporter", name=op.f("pk_check_reports")),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("check_reports")
    op.drop_table("checkings")
