"""Completions: one row each, with a Hold of its own beside those of Jobs' requests.

Revision ID: 0004
Revises: 0003
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COMPLETIONS = """
CREATE TABLE completions (
    id              uuid PRIMARY KEY,
    account_id      uuid NOT NULL REFERENCES accounts,
    model           text NOT NULL,
    state           text NOT NULL DEFAULT 'pending' CHECK (
        state IN ('pending', 'running', 'succeeded', 'errored', 'cancelled', 'expired')),
    spec            jsonb,  -- a list, one request spec for each prompt; forgotten at the end
    prompt_tokens   bigint NOT NULL CHECK (prompt_tokens > 0),
    tokens_held     bigint NOT NULL CHECK (tokens_held > 0),
    completion_tokens bigint CHECK (completion_tokens >= 0),
    tokens_charged  bigint CHECK (tokens_charged BETWEEN 0 AND tokens_held),
    error_code      text,
    error_message   text,
    worker_id       uuid,
    created_at      timestamptz NOT NULL DEFAULT now(),
    claimed_at      timestamptz,
    deadline        timestamptz NOT NULL,
    finished_at     timestamptz,
    CONSTRAINT ck_completions_finished CHECK (
        (finished_at IS NOT NULL) = (state NOT IN ('pending', 'running'))
        AND (finished_at IS NULL) = (spec IS NOT NULL)
        AND (finished_at IS NULL) = (tokens_charged IS NULL)),
    CONSTRAINT ck_completions_claimed CHECK ((worker_id IS NULL) = (claimed_at IS NULL)
        AND (state NOT IN ('running', 'succeeded') OR worker_id IS NOT NULL)
        AND (state <> 'pending' OR worker_id IS NULL)),
    CONSTRAINT ck_completions_tokens CHECK (
        (state <> 'succeeded' OR completion_tokens IS NOT NULL)
        AND (state IN ('succeeded', 'cancelled') OR completion_tokens IS NULL)),
    CONSTRAINT ck_completions_error CHECK ((error_code IS NOT NULL)
        = (state IN ('errored', 'expired')) AND (error_code IS NULL) = (error_message IS NULL))
);
CREATE INDEX ix_completions_open ON completions (deadline) WHERE finished_at IS NULL;
CREATE INDEX ix_completions_account ON completions (account_id)
    INCLUDE (tokens_charged, tokens_held);
"""

HOLDS = """
ALTER TABLE holds
    ALTER COLUMN job_id DROP NOT NULL,
    ALTER COLUMN request_index DROP NOT NULL,
    ADD COLUMN completion_id uuid REFERENCES completions,
    ADD CONSTRAINT uq_holds_completion UNIQUE (completion_id),
    ADD CONSTRAINT ck_holds_owner CHECK ((job_id IS NULL) = (completion_id IS NOT NULL)
        AND (job_id IS NULL) = (request_index IS NULL));
"""


def upgrade() -> None:
    """Create the table of Completions, and let a Hold belong to one."""
    op.execute(COMPLETIONS)
    op.execute(HOLDS)


def downgrade() -> None:
    """Go back while no Completion was ever sent; the ledger's rows are never deleted."""
    op.execute(
        """
        ALTER TABLE holds DROP CONSTRAINT ck_holds_owner, DROP COLUMN completion_id,
            ALTER COLUMN request_index SET NOT NULL, ALTER COLUMN job_id SET NOT NULL
        """
    )
    op.execute("DROP TABLE completions")
