"""Alembic's entry: online migrations on the database given by `app.kit.migrate`."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
