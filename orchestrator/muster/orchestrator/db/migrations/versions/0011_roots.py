"""Outcomes say which root they are of: a reorganisation gives its number to another batch."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; of what was handed in before it is unknown."""
    op.add_column("outcomes", sa.Column("batch_root", sa.LargeBinary, nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("outcomes", "batch_root")
