"""Indices for lists of submissions by worker and by step, latest first."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create them."""
    for column in ("worker", "step"):
        name = op.f(f"ix_submissions_{column}_sequence")
        op.create_index(name, "submissions", [column, "sequence"])


def downgrade() -> None:
    """Drop them."""
    for column in ("worker", "step"):
        op.drop_index(op.f(f"ix_submissions_{column}_sequence"), "submissions")
