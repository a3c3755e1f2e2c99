"""Submissions are found by their leaf, and what was signed twice is remembered until punished."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.sql.elements import conv

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

LEAF = conv("ix_submissions_leaf")


def upgrade() -> None:
    """Add both; runs of the contracts before these are not served, so no leaf is computed."""
    op.add_column("submissions", sa.Column("leaf", sa.LargeBinary, nullable=True))
    op.create_index(LEAF, "submissions", ["leaf"])
    op.create_table(
        "doubles",
        sa.Column("offence", sa.String, primary_key=True),
        sa.Column("owner", sa.String, primary_key=True),
        sa.Column("tag", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("signed", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    """Drop both."""
    op.drop_table("doubles")
    op.drop_index(LEAF, "submissions")
    op.drop_column("submissions", "leaf")
