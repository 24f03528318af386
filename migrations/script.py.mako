"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Say what users or operators get."""
    op.execute("SET lock_timeout = '5s'")


def downgrade() -> None:
    """Undo it."""
