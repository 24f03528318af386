"""Say of every file of activations what it was read from: site, before or after ops, reduction.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS = """
ALTER TABLE result_files
    ADD COLUMN site text,
    ADD COLUMN before boolean,
    ADD COLUMN reduce text,
    ADD COLUMN width integer CHECK (width > 0);
UPDATE result_files SET site = 'resid_post', before = false, reduce = 'none'
WHERE kind IN ('activations', 'captures');
ALTER TABLE result_files ADD CONSTRAINT ck_result_files_reads CHECK (
    (kind IN ('activations', 'captures'))
    = (site IS NOT NULL AND before IS NOT NULL AND reduce IS NOT NULL));
"""


def upgrade() -> None:
    """Add the columns; files that are there already are reads of resid_post, every row."""
    op.execute(COLUMNS)


def downgrade() -> None:
    """Drop them."""
    op.execute(
        """
        ALTER TABLE result_files
            DROP CONSTRAINT ck_result_files_reads,
            DROP COLUMN site, DROP COLUMN before, DROP COLUMN reduce, DROP COLUMN width
        """
    )
