"""Open leases are counted without reading their tickets."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.sql.elements import conv

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INDEX = conv("ix_leases_policy_version_is_filled_deadline")


def upgrade() -> None:
    """Copy the policy version out of the tickets, and index it."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("leases", sa.Column("policy_version", number, nullable=False, server_default="0"))
    leases = sa.table("leases", sa.column("policy_version"), sa.column("ticket", sa.JSON))
    op.execute(
        leases.update().values(policy_version=leases.c.ticket["policy_version"].as_integer())
    )
    op.create_index(INDEX, "leases", ["policy_version", "is_filled", "deadline"])


def downgrade() -> None:
    """Drop it."""
    op.drop_index(INDEX, "leases")
    op.drop_column("leases", "policy_version")
