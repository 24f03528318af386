"""Typical norms of the residual stream by layer, and the field that a worker's refusal is about.

Revision ID: 0005
Revises: 0004
"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

MODEL_NORMS = """
CREATE TABLE model_norms (
    model       text NOT NULL,
    revision    text NOT NULL,
    dtype       text NOT NULL,
    norms       float8[] NOT NULL CHECK (cardinality(norms) > 0),  -- by layer, at resid_post
    measured_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (model, revision, dtype)
);
"""


def upgrade() -> None:
    """Create the table of typical norms, and let an error name its field."""
    op.execute(MODEL_NORMS)
    op.execute("ALTER TABLE completions ADD COLUMN error_param text")


def downgrade() -> None:
    """Go back; workers measure again when they start."""
    op.execute("ALTER TABLE completions DROP COLUMN error_param")
    op.execute("DROP TABLE model_norms")
