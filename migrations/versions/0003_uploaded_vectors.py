"""What is known of a stored vector beside its numbers: a name, metadata, and whether it was sent.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UPLOADS = """
ALTER TABLE vectors
    ADD COLUMN name text CHECK (length(name) BETWEEN 1 AND 200),
    ADD COLUMN metadata jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN uploaded_at timestamptz;
CREATE INDEX ix_vectors_account ON vectors (account_id, created_at, digest);
CREATE INDEX ix_vectors_uploaded ON vectors (account_id, created_at, digest)
    WHERE uploaded_at IS NOT NULL;
"""


def upgrade() -> None:
    """Tell vectors that a user stored from those that Jobs brought along (uploaded_at is NULL)."""
    op.execute(UPLOADS)


def downgrade() -> None:
    """Forget names, metadata and origin; the numbers stay."""
    op.execute("DROP INDEX ix_vectors_uploaded; DROP INDEX ix_vectors_account")
    op.execute(
        "ALTER TABLE vectors DROP COLUMN uploaded_at, DROP COLUMN metadata, DROP COLUMN name"
    )
