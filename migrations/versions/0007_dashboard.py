"""What the dashboard reads: samples of throughput, and indexes that pages of Jobs follow.

Revision ID: 0007
Revises: 0006
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# Filled by the reconciler. `sampled_jobs` keeps what of each recent Job was counted already.
SAMPLES = """
CREATE TABLE samples (
    at          timestamptz PRIMARY KEY,
    seconds     real NOT NULL CHECK (seconds > 0),
    requests    bigint NOT NULL CHECK (requests >= 0),
    errored     bigint NOT NULL CHECK (errored BETWEEN 0 AND requests),
    tokens      bigint NOT NULL CHECK (tokens >= 0)
);
CREATE TABLE sampled_jobs (
    job_id      uuid PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
    requests    integer NOT NULL,
    errored     integer NOT NULL,
    tokens      bigint NOT NULL
);
"""

INDEXES = """
CREATE INDEX ix_jobs_newest ON jobs (created_at DESC, id DESC);
CREATE INDEX ix_jobs_state ON jobs (state, created_at DESC, id DESC);
CREATE INDEX ix_jobs_model ON jobs (model, created_at DESC, id DESC);
CREATE INDEX ix_jobs_unfinished ON jobs (created_at DESC, id DESC) WHERE finished_at IS NULL;
CREATE INDEX ix_jobs_finished ON jobs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX ix_jobs_with_errors ON jobs (created_at DESC, id DESC) WHERE n_errored > 0;
CREATE INDEX ix_completions_finished ON completions (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX ix_workers_heard ON workers (heartbeat_at);
"""


def upgrade() -> None:
    """Create the tables and the indexes."""
    op.execute(SAMPLES)
    op.execute(INDEXES)


def downgrade() -> None:
    """Drop them."""
    op.execute(
        """
        DROP INDEX ix_jobs_newest, ix_jobs_state, ix_jobs_model, ix_jobs_unfinished,
            ix_jobs_finished, ix_jobs_with_errors, ix_completions_finished, ix_workers_heard
        """
    )
    op.execute("DROP TABLE sampled_jobs")
    op.execute("DROP TABLE samples")
