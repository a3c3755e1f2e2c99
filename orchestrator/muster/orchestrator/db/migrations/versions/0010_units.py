"""Units in flight are counted without reading submissions; a worker's tickets are found by it."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.sql.elements import conv

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

UNFILLED, WAITING = conv("ix_leases_unfilled"), conv("ix_submissions_waiting")


def upgrade() -> None:
    """Copy the units out of the claims; index what is open."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("submissions", sa.Column("units", number, nullable=False, server_default="0"))
    rows = sa.table("submissions", sa.column("units"), sa.column("submission", sa.JSON))
    units = sa.cast(rows.c.submission["units"].as_string(), sa.BigInteger)
    op.execute(rows.update().values(units=units))
    _index(UNFILLED, "leases", ["worker", "deadline"], "is_filled = false")
    _index(WAITING, "submissions", ["worker"], "batch_root IS NULL")


def _index(name: str, table: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    """Drop them."""
    op.drop_index(WAITING, "submissions")
    op.drop_index(UNFILLED, "leases")
    op.drop_column("submissions", "units")
