"""Whether a submission's file is still kept."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column(
        "submissions", sa.Column("has_file", sa.Boolean, nullable=False, server_default=sa.true())
    )
    op.create_index(
        op.f("ix_submissions_has_file_sequence"), "submissions", ["has_file", "sequence"]
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_index(op.f("ix_submissions_has_file_sequence"), "submissions")
    op.drop_column("submissions", "has_file")
