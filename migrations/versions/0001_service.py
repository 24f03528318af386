"""Accounts, keys, ledger, vectors, Jobs, requests, shards, parts, workers.

Revision ID: 0001
Revises:
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ACCOUNTS = """
CREATE TABLE accounts (
    id          uuid PRIMARY KEY,
    name        text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
    balance     bigint NOT NULL DEFAULT 0,
    held        bigint NOT NULL DEFAULT 0,
    created_at  timestamptz NOT NULL DEFAULT now(),
    holds_stopped_at timestamptz,
    holds_stopped_reason text,
    CONSTRAINT ck_accounts_held_within_balance CHECK (0 <= held AND held <= balance),
    CONSTRAINT ck_accounts_holds_stopped CHECK (
        (holds_stopped_at IS NULL) = (holds_stopped_reason IS NULL))
);
CREATE TABLE api_keys (
    id          uuid PRIMARY KEY,
    account_id  uuid NOT NULL REFERENCES accounts,
    name        text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
    digest      bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
    last4       text NOT NULL CHECK (length(last4) = 4),
    scopes      text[] NOT NULL CHECK (
        cardinality(scopes) > 0
        AND scopes <@ ARRAY['completions', 'jobs:read', 'jobs:write', 'vectors', 'admin']
    ),
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);
CREATE INDEX ix_api_keys_account ON api_keys (account_id);
CREATE TABLE idempotency_keys (
    account_id  uuid NOT NULL REFERENCES accounts,
    key         text NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
    fingerprint bytea NOT NULL CHECK (octet_length(fingerprint) = 32),
    status      integer,
    answer      jsonb,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (account_id, key)
);
CREATE INDEX ix_idempotency_keys_created ON idempotency_keys (created_at);
"""

VECTORS = """
CREATE TABLE vectors (
    account_id  uuid NOT NULL REFERENCES accounts,
    digest      bytea NOT NULL CHECK (octet_length(digest) = 32),
    dtype       text NOT NULL CHECK (dtype IN ('float32', 'bfloat16')),
    shape       integer[] NOT NULL CHECK (cardinality(shape) BETWEEN 1 AND 3),
    data        bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (account_id, digest)
);
ALTER TABLE vectors ALTER COLUMN data SET STORAGE EXTERNAL;
"""

JOBS = """
CREATE SEQUENCE lease_tokens;
CREATE TABLE jobs (
    id              uuid PRIMARY KEY,
    account_id      uuid NOT NULL REFERENCES accounts,
    state           text NOT NULL CHECK (state IN (
        'draft', 'validating', 'queued', 'in_progress', 'paused', 'cancelling',
        'finalizing', 'completed', 'failed', 'cancelled', 'expired')),
    name            text CHECK (length(name) <= 200),
    metadata        jsonb NOT NULL DEFAULT '{}',
    model           text NOT NULL,
    model_revision  text NOT NULL,
    dtype           text NOT NULL,
    engine          text,
    reproducible    boolean NOT NULL DEFAULT false,
    priority        smallint NOT NULL DEFAULT 1 CHECK (priority BETWEEN 0 AND 2),
    version         integer NOT NULL DEFAULT 1 CHECK (version >= 1),
    sequence        bigint NOT NULL DEFAULT 0,
    n_total         integer NOT NULL CHECK (n_total >= 0),
    n_running       integer NOT NULL DEFAULT 0 CHECK (n_running >= 0),
    n_succeeded     integer NOT NULL DEFAULT 0 CHECK (n_succeeded >= 0),
    n_errored       integer NOT NULL DEFAULT 0 CHECK (n_errored >= 0),
    n_cancelled     integer NOT NULL DEFAULT 0 CHECK (n_cancelled >= 0),
    n_expired       integer NOT NULL DEFAULT 0 CHECK (n_expired >= 0),
    prompt_tokens   bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    tokens_held     bigint NOT NULL DEFAULT 0 CHECK (tokens_held >= 0),
    tokens_charged  bigint NOT NULL DEFAULT 0 CHECK (tokens_charged >= 0),
    tokens_released bigint NOT NULL DEFAULT 0 CHECK (tokens_released >= 0),
    created_at      timestamptz NOT NULL DEFAULT now(),
    started_at      timestamptz,
    ended_running_at timestamptz,
    finished_at     timestamptz,
    expires_at      timestamptz NOT NULL,
    cancel_requested_at timestamptz,
    expiry_began_at timestamptz,
    error_code      text,
    error_message   text,
    CONSTRAINT ck_jobs_counts CHECK (
        n_running + n_succeeded + n_errored + n_cancelled + n_expired <= n_total),
    CONSTRAINT ck_jobs_finished CHECK (
        (finished_at IS NOT NULL) = (state IN ('completed', 'failed', 'cancelled', 'expired'))),
    CONSTRAINT ck_jobs_terminal_is_whole CHECK (
        state NOT IN ('completed', 'failed', 'cancelled', 'expired') OR (
            n_running = 0 AND tokens_held = 0
            AND n_succeeded + n_errored + n_cancelled + n_expired = n_total)),
    CONSTRAINT ck_jobs_cancelling CHECK (
        state NOT IN ('cancelling', 'cancelled') OR cancel_requested_at IS NOT NULL),
    CONSTRAINT ck_jobs_expired CHECK (state <> 'expired' OR expiry_began_at IS NOT NULL),
    CONSTRAINT ck_jobs_ended_running CHECK (
        state NOT IN ('finalizing', 'completed', 'failed', 'cancelled', 'expired')
        OR ended_running_at IS NOT NULL),
    CONSTRAINT ck_jobs_started CHECK (state <> 'in_progress' OR started_at IS NOT NULL)
);
CREATE INDEX ix_jobs_account ON jobs (account_id, created_at DESC, id DESC);
CREATE INDEX ix_jobs_live ON jobs (model, priority, created_at)
    WHERE state IN ('queued', 'in_progress');
CREATE INDEX ix_jobs_expiring ON jobs (expires_at)
    WHERE state IN ('queued', 'in_progress', 'paused') AND expiry_began_at IS NULL;
CREATE INDEX ix_jobs_finishable ON jobs (id)
    WHERE state NOT IN ('completed', 'failed', 'cancelled', 'expired')
        AND n_succeeded + n_errored + n_cancelled + n_expired = n_total;
CREATE TABLE job_vectors (
    job_id      uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    account_id  uuid NOT NULL,
    digest      bytea NOT NULL,
    PRIMARY KEY (job_id, digest),
    FOREIGN KEY (account_id, digest) REFERENCES vectors (account_id, digest)
);
CREATE INDEX ix_job_vectors_vector ON job_vectors (account_id, digest);
CREATE TABLE requests (
    job_id          uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    request_index   integer NOT NULL CHECK (request_index >= 0),
    custom_id       text CHECK (length(custom_id) BETWEEN 1 AND 128),
    state           text NOT NULL DEFAULT 'pending' CHECK (
        state IN ('pending', 'succeeded', 'errored', 'cancelled', 'expired')),
    version         integer NOT NULL DEFAULT 1 CHECK (version >= 1),
    spec            jsonb NOT NULL,
    prompt_tokens   integer NOT NULL CHECK (prompt_tokens >= 0),
    completion_tokens integer CHECK (completion_tokens >= 0),
    attempt         integer,
    error_code      text,
    error_message   text,
    finished_at     timestamptz,
    PRIMARY KEY (job_id, request_index),
    CONSTRAINT ck_requests_finished CHECK ((finished_at IS NULL) = (state = 'pending')),
    CONSTRAINT ck_requests_error CHECK ((error_code IS NOT NULL) = (state = 'errored')),
    CONSTRAINT ck_requests_tokens CHECK (
        (completion_tokens IS NOT NULL) = (state = 'succeeded'))
);
CREATE UNIQUE INDEX uq_requests_custom_id ON requests (job_id, custom_id)
    WHERE custom_id IS NOT NULL;
CREATE INDEX ix_requests_errored ON requests (job_id, request_index)
    WHERE error_code IS NOT NULL;
"""

LEDGER = """
CREATE TABLE holds (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account_id      uuid NOT NULL,  -- the Job's own (L5-owner); a key took a third of placing
    job_id          uuid NOT NULL REFERENCES jobs,
    request_index   integer NOT NULL,
    version         integer NOT NULL,
    amount          bigint NOT NULL CHECK (amount > 0),
    created_at      timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_holds_request UNIQUE (job_id, request_index, version)
);
CREATE INDEX ix_holds_account ON holds (account_id, id);
CREATE TABLE entries (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    account_id  uuid NOT NULL REFERENCES accounts,
    kind        text NOT NULL CHECK (kind IN ('grant', 'reversal', 'settle', 'release')),
    amount      bigint NOT NULL CHECK (amount >= 0),
    hold_id     bigint REFERENCES holds,
    clipped     bigint NOT NULL DEFAULT 0 CHECK (clipped >= 0),
    note        text,
    created_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT uq_entries_hold UNIQUE (hold_id),
    CONSTRAINT ck_entries_hold CHECK ((kind IN ('settle', 'release')) = (hold_id IS NOT NULL)),
    CONSTRAINT ck_entries_clipped CHECK (clipped = 0 OR kind = 'settle')
);
CREATE INDEX ix_entries_account ON entries (account_id, id);
CREATE INDEX ix_entries_grants ON entries (account_id) WHERE kind IN ('grant', 'reversal');
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % are never changed', TG_TABLE_NAME;
END $$;
CREATE TRIGGER entries_are_final BEFORE UPDATE OR DELETE OR TRUNCATE ON entries
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER holds_are_final BEFORE UPDATE OR DELETE OR TRUNCATE ON holds
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

SHARDS = """
CREATE TABLE workers (
    id              uuid PRIMARY KEY,
    model           text NOT NULL,
    model_revision  text NOT NULL,
    dtype           text NOT NULL,
    engine          text,
    mode            text,
    host            text NOT NULL,
    pid             integer NOT NULL,
    state           text NOT NULL CHECK (state IN ('starting', 'ready', 'draining', 'gone')),
    drain_requested boolean NOT NULL DEFAULT false,
    started_at      timestamptz NOT NULL DEFAULT now(),
    ready_at        timestamptz,
    heartbeat_at    timestamptz NOT NULL DEFAULT now(),
    last_claim_at   timestamptz,
    last_canary_at  timestamptz,
    canary          text,
    rss_bytes       bigint,
    requests_running integer,
    tokens_per_second real
);
CREATE INDEX ix_workers_model ON workers (model, heartbeat_at);
CREATE TABLE shards (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id          uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    first_index     integer NOT NULL CHECK (first_index >= 0),
    end_index       integer NOT NULL,
    state           text NOT NULL DEFAULT 'pending' CHECK (
        state IN ('pending', 'leased', 'done')),
    lease_token     bigint,
    lease_expires_at timestamptz,
    worker_id       uuid,
    attempt         integer NOT NULL DEFAULT 0,
    engine_deaths   integer NOT NULL DEFAULT 0,
    deaths_alone    integer NOT NULL DEFAULT 0,
    leased_at       timestamptz,
    finished_at     timestamptz,
    CONSTRAINT ck_shards_range CHECK (first_index < end_index),
    CONSTRAINT ck_shards_lease CHECK (
        (state = 'leased') = (lease_expires_at IS NOT NULL)
        AND (state = 'leased') = (worker_id IS NOT NULL)
        AND (state <> 'leased' OR (lease_token IS NOT NULL AND leased_at IS NOT NULL))
        AND (state <> 'pending' OR lease_token IS NULL)),
    CONSTRAINT uq_shards_token UNIQUE (lease_token),
    CONSTRAINT ck_shards_finished CHECK ((state = 'done') = (finished_at IS NOT NULL)),
    CONSTRAINT uq_shards_first UNIQUE (job_id, first_index)
);
CREATE INDEX ix_shards_pending ON shards (job_id, first_index) WHERE state = 'pending';
CREATE INDEX ix_shards_leased ON shards (lease_expires_at) WHERE state = 'leased';
CREATE TABLE turns (
    account_id  uuid NOT NULL REFERENCES accounts,
    model       text NOT NULL,
    served_at   timestamptz NOT NULL,
    PRIMARY KEY (account_id, model)
);
CREATE TABLE parts (
    lease_token     bigint PRIMARY KEY,
    job_id          uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    first_index     integer NOT NULL,
    end_index       integer NOT NULL,
    published_at    timestamptz NOT NULL DEFAULT now(),
    superseded_at   timestamptz,
    CONSTRAINT ck_parts_range CHECK (first_index < end_index)
);
CREATE UNIQUE INDEX uq_parts_live ON parts (job_id, first_index) WHERE superseded_at IS NULL;
CREATE TABLE result_files (
    job_id          uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    path            text NOT NULL,
    lease_token     bigint REFERENCES parts ON DELETE CASCADE,
    kind            text NOT NULL CHECK (kind IN (
        'results', 'activations', 'captures', 'moments', 'stats', 'manifest', 'checksums')),
    layer           integer,
    capture         text,
    rows            bigint NOT NULL CHECK (rows >= 0),
    bytes           bigint NOT NULL CHECK (bytes >= 0),
    sha256          text NOT NULL CHECK (sha256 ~ '^[0-9a-f]{64}$'),
    first_index     integer,
    end_index       integer,
    PRIMARY KEY (job_id, path)
);
CREATE INDEX ix_result_files_part ON result_files (lease_token);
"""

TABLES = (
    "result_files",
    "parts",
    "turns",
    "shards",
    "workers",
    "entries",
    "holds",
    "requests",
    "job_vectors",
    "jobs",
    "vectors",
    "idempotency_keys",
    "api_keys",
    "accounts",
)


def upgrade() -> None:
    """Create the whole schema of the service."""
    for block in (ACCOUNTS, VECTORS, JOBS, LEDGER, SHARDS):
        op.execute(block)


def downgrade() -> None:
    """Drop it."""
    for table in TABLES:
        op.execute(f"DROP TABLE {table} CASCADE")
    op.execute("DROP SEQUENCE lease_tokens")
    op.execute("DROP FUNCTION refuse_change")
