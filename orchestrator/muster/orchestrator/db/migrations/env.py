"""Alembic environment: runs on the connection that `Database.open` hands over."""

from alembic import context

from muster.orchestrator.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
