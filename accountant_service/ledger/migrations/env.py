"""Alembic's entry point: run the migrations on the connection that `database` passes."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, render_as_batch=True)
context.run_migrations()
