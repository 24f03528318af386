"""The dashboard: a role on admin keys, sessions, the audit log, and runs of the invariants.

Revision ID: 0006
Revises: 0005
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ROLES = """
ALTER TABLE api_keys
    ADD COLUMN role text CHECK (role IN ('read-only', 'operator', 'admin'));
UPDATE api_keys SET role = 'admin' WHERE 'admin' = ANY(scopes);
ALTER TABLE api_keys ADD CONSTRAINT ck_api_keys_role CHECK (
    (role IS NOT NULL) = ('admin' = ANY(scopes)));
"""

SESSIONS = """
CREATE TABLE admin_sessions (
    id          uuid PRIMARY KEY,
    key_id      uuid NOT NULL REFERENCES api_keys,
    digest      bytea NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
    created_at  timestamptz NOT NULL DEFAULT now(),
    last_seen_at timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL,
    ended_at    timestamptz
);
CREATE INDEX ix_admin_sessions_key ON admin_sessions (key_id);
CREATE INDEX ix_admin_sessions_expiry ON admin_sessions (expires_at);
"""

# No foreign keys: the log outlives what it speaks of.
AUDIT = """
CREATE TABLE audit_log (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT now(),
    key_id      uuid,
    session_id  uuid,
    name        text NOT NULL,
    role        text,
    action      text NOT NULL CHECK (length(action) BETWEEN 1 AND 100),
    target      text NOT NULL,
    before      jsonb,
    after       jsonb,
    address     text,
    form_token  uuid,
    CONSTRAINT uq_audit_log_form UNIQUE (form_token)
);
CREATE INDEX ix_audit_log_target ON audit_log (target, id);
CREATE INDEX ix_audit_log_action ON audit_log (action, id);
CREATE INDEX ix_audit_log_key ON audit_log (key_id, id);
CREATE INDEX ix_audit_log_failures ON audit_log (address, at) WHERE action = 'login_failed';
CREATE TRIGGER audit_log_is_final BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

RUNS = """
CREATE TABLE invariant_runs (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    began_at    timestamptz NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    run_by      text NOT NULL,
    rules       jsonb NOT NULL
);
"""


def upgrade() -> None:
    """Give every key that has the scope admin the role admin; create the tables."""
    for block in (ROLES, SESSIONS, AUDIT, RUNS):
        op.execute(block)


def downgrade() -> None:
    """Forget roles, sessions, the audit log and the runs."""
    for table in ("invariant_runs", "audit_log", "admin_sessions"):
        op.execute(f"DROP TABLE {table}")
    op.execute("ALTER TABLE api_keys DROP CONSTRAINT ck_api_keys_role, DROP COLUMN role")
