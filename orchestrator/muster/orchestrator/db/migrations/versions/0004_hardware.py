"""Hardware reports of nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "hardware",
        sa.Column("node", sa.String, nullable=False),
        sa.Column("report", sa.String, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.Column("report_hash", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("node", name=op.f("pk_hardware")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("hardware")
