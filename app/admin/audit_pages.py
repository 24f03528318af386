"""The pages of the audit log: newest first, filtered by act, thing and key, read by key."""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.admin.access import LOGGED_IN, PATH
from app.admin.accounts import entry_id_of
from app.admin.followed import Followed, live_at, stands_still
from app.admin.pages import render
from app.kit.db import Conn
from app.kit.deps import DatabaseDep
from app.kit.ids import parse_id, public_id

router = APIRouter()

PAGE: Final = 50
PIECES: Final = {"acts": "_audit_list.html"}
FIELDS: Final = ("action", "target", "key")
# Every act there is, and what a reader calls it.
ACTIONS: Final = {
    "login": "logged in",
    "login_failed": "failed to log in",
    "logout": "logged out",
    "account.create": "created an account",
    "tokens.grant": "granted tokens",
    "tokens.reversal": "took tokens back",
    "key.create": "created a key",
    "key.revoke": "revoked a key",
    "holds.stop": "stopped Holds",
    "holds.allow": "allowed Holds",
    "job.cancel": "cancelled a Job",
    "jobs.cancel": "cancelled Jobs",
    "worker.drain": "drained a worker",
    "worker.undrain": "took a drain back",
    "invariants.run": "ran the invariants",
}
# What a field of an act is called where its own name says too little.
FIELD_WORDS: Final = {
    ("invariants.run", "true"): "rules that hold",
    ("invariants.run", "broken"): "rules broken",
    ("invariants.run", "unfinished"): "rules not finished",
}
# Where the thing that was acted on has a page.
PLACES: Final = {"acct_": "/admin/accounts/", "job_": "/admin/jobs/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One act as it was written down."""

    id: int
    at: datetime
    key_id: UUID | None
    session_id: UUID | None
    name: str
    role: str | None
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    address: str | None

    @property
    def act(self) -> str:
        """Say what was done."""
        return ACTIONS.get(self.action, self.action)

    @property
    def place(self) -> str | None:
        """Give the address of the page of what it was done to, if it has one."""
        for prefix, address in PLACES.items():
            if self.target.startswith(prefix):
                return address + self.target
        return None

    @property
    def key_ref(self) -> str | None:
        """Write the id of the key that acted."""
        return None if self.key_id is None else public_id("key", self.key_id)

    @property
    def changes(self) -> list[tuple[str, str | None, str | None]]:
        """List each field with its value before and after; None where there was none."""
        before, after = self.before or {}, self.after or {}
        changes = (
            (
                FIELD_WORDS.get((self.action, name), name),
                _shown(before, name),
                _shown(after, name),
            )
            for name in before | after
        )
        return [change for change in changes if change[1:] != (None, None)]


@router.get("/audit", dependencies=[LOGGED_IN])
def show_audit_log(request: Request, database: DatabaseDep) -> HTMLResponse:
    """List acts, newest first; `action`, `target` and `key` filter, `before` pages."""
    asked = _asked(request)
    before = entry_id_of(request.query_params.get("before"))
    query = {name: value for name, value in asked.items() if value}
    still = stands_still(f"{PATH}/audit?{urlencode(query)}")
    return render(
        request,
        "audit.html",
        **database.read(lambda conn: _read(conn, asked, before)),
        **(live_at("audit", **query) if before is None else still),
        actions=list(ACTIONS.items()),
    )


def followed(request: Request) -> Followed:
    """Say how the first page of the audit log is followed."""
    asked = _asked(request)
    return Followed(
        key=f"audit {urlencode(asked)}",
        read=lambda conn: _read(conn, asked, None),
        pieces=PIECES,
    )


def _asked(request: Request) -> dict[str, str]:
    return {name: request.query_params.get(name, "").strip() for name in FIELDS}


def _read(conn: Conn, asked: dict[str, str], before: int | None) -> dict[str, Any]:
    """Read a page of the log and what its templates need."""
    action, target, key = (asked[name] for name in FIELDS)
    key_id = parse_id("key", key)
    entries: list[AuditEntry] = []
    if not key or key_id is not None:
        entries = list_audit(
            conn, action=action or None, target=target or None, key_id=key_id, before=before
        )
    return {
        "entries": entries[:PAGE],
        "older": entries[PAGE - 1].id if len(entries) > PAGE else None,
        "first": before is None,
        **asked,
    }


def list_audit(
    conn: Conn,
    *,
    action: str | None = None,
    target: str | None = None,
    key_id: UUID | None = None,
    before: int | None = None,
) -> list[AuditEntry]:
    """Read one page of the audit log and one row more."""
    rows = conn.execute(
        """
        SELECT id, at, key_id, session_id, name, role, action, target, before, after, address
        FROM audit_log
        WHERE (%(action)s::text IS NULL OR action = %(action)s)
            AND (%(target)s::text IS NULL OR target = %(target)s)
            AND (%(key_id)s::uuid IS NULL OR key_id = %(key_id)s)
            AND (%(before)s::bigint IS NULL OR id < %(before)s)
        ORDER BY id DESC LIMIT %(limit)s
        """,
        {
            "action": action,
            "target": target,
            "key_id": key_id,
            "before": before,
            "limit": PAGE + 1,
        },
    ).fetchall()
    return [AuditEntry(**row) for row in rows]


def _shown(fields: dict[str, Any], name: str) -> str | None:
    if name not in fields or fields[name] is None:
        return None
    value = fields[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
