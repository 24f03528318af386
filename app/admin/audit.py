"""The audit log: one row for every act of an operator, written in the act's own transaction.

Operators act at the dashboard, and with `python -m app` on a machine of the service.

Rows are added, never changed (a trigger refuses it). `before` and `after` hold the fields that the
act changed; secrets, prompts and texts never enter them.
"""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from psycopg.types.json import Jsonb

from app.admin.access import Operator
from app.errors import ConflictError
from app.kit.db import Conn

Fields = Mapping[str, Any]
COMMAND_LINE: Final = "command line"


def record(
    conn: Conn,
    operator: Operator | None,
    action: str,
    target: str,
    *,
    before: Fields | None = None,
    after: Fields | None = None,
    address: str | None = None,
    token: UUID | None = None,
    actor: str = "nobody",
) -> None:
    """Write down one act; `target` is the public id of what it was done to ("job_…", "acct_…").

    `operator` is None while nobody is logged in; `actor` is then who acts. `token` names a form
    that may be sent twice but counts once. Raises ConflictError, which rolls the act back with it,
    when an act with this token was written down before.
    """
    written = conn.execute(
        """
        INSERT INTO audit_log (key_id, session_id, name, role, action, target, before, after,
            address, form_token)
        VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
        ON CONFLICT (form_token) DO NOTHING
        """,
        [
            *(None if operator is None else operator.key_id,),
            *(None if operator is None else operator.session_id,),
            *(actor if operator is None else operator.name,),
            *(None if operator is None else operator.role,),
            *(action, target),
            *(None if before is None else Jsonb(dict(before)),),
            *(None if after is None else Jsonb(dict(after)),),
            *(address, token),
        ],
    )
    if written.rowcount != 1:
        msg = "This form was sent before, and it counts once. Load the page again."
        raise ConflictError(msg)


def was_recorded(conn: Conn, token: UUID) -> bool:
    """Tell whether the form with this token was carried out already."""
    row = conn.execute("SELECT 1 FROM audit_log WHERE form_token = %s", [token]).fetchone()
    return row is not None
