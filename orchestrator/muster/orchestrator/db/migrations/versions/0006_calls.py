"""When a validator's outcomes were received."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("outcomes", sa.Column("received_at", number, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("outcomes", "received_at")
