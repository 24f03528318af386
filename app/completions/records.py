"""Rows of Completions: stored with their Hold, claimed once, ended once.

Whoever ends a row resolves its Hold in the same transaction, and only one can: every move names
the states that it may come from. A worker that comes late finds that its row has ended.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import orjson
from psycopg.types.json import Jsonb

from app.completions.spec import RequestSpec, spec_from_json, spec_to_json
from app.completions.states import CompletionState, states_before
from app.completions.unlisted import UnlistedCompletion
from app.kit.db import Conn
from app.ledger.holds import place_completion_hold, resolve_completion_hold

# A living worker claims within milliseconds, whatever else it does.
CLAIM_SECONDS = 5.0
# Five missed heartbeats. A client waits, so its worker is given up sooner than a lease.
WORKER_SILENT_SECONDS = 10.0
ENDED_MAX = 200


@dataclass(frozen=True, slots=True)
class ClaimedCompletion:
    """A Completion that one worker runs now; `specs` has one for each prompt.

    With `stream`, its tokens are read as they come. With `body`, it was passed on as it was sent,
    and the worker has to check it first. When it was claimed, `seconds_left` were left to it.
    """

    id: UUID
    account_id: UUID
    specs: tuple[RequestSpec, ...]
    stream: bool = False
    body: dict[str, Any] | None = None
    seconds_left: float = field(default=math.inf, compare=False)  # it only ever gets less


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a Completion has no answer; `param` is the field of a body that broke a rule."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a Completion stands; `failure` once it errored or expired."""

    state: CompletionState
    failure: Failure | None = None

    @property
    def is_final(self) -> bool:
        """True when the Hold is resolved."""
        return self.state not in (CompletionState.pending, CompletionState.running)


FAILURES = {
    "deadline_exceeded": "The Completion was not finished within the time that a request may take. "
    "Lower max_tokens, or send it as a Job.",
    "not_taken": "No worker took the Completion. Send it again in a moment.",
    "worker_lost": "The worker that ran the Completion was lost. Send it again.",
}


def has_worker(conn: Conn, model: str) -> bool:
    """Tell whether a worker serves the model now."""
    row = conn.execute(
        """
        SELECT 1 FROM workers WHERE model = %s AND state = 'ready'
            AND heartbeat_at > clock_timestamp() - make_interval(secs => %s) LIMIT 1
        """,
        [model, WORKER_SILENT_SECONDS],
    ).fetchone()
    return row is not None


def store_completion(
    conn: Conn,
    account_id: UUID,
    completion_id: UUID,
    *,
    model: str,
    specs: Sequence[RequestSpec],
    seconds: float,
    stream: bool = False,
) -> None:
    """Store a Completion that must end within `seconds`, and hold its tokens; repeatable.

    Raises InsufficientTokensError or UnavailableError; the caller's transaction then rolls back.
    """
    _store(
        conn,
        account_id,
        completion_id,
        model=model,
        spec={"stream": stream, "prompts": [spec_to_json(spec) for spec in specs]},
        prompt_tokens=sum(spec.prompt_tokens for spec in specs),
        tokens_held=sum(spec.tokens_held for spec in specs),
        seconds=seconds,
    )


def store_unlisted(
    conn: Conn, account_id: UUID, unlisted: UnlistedCompletion, *, seconds: float
) -> None:
    """Store a Completion that its worker will check, and hold its upper bound; as above."""
    # As one text: Postgres would rewrite millions of numbers one by one.
    spec = {"stream": unlisted.stream, "body": orjson.dumps(unlisted.body).decode()}
    _store(
        conn,
        account_id,
        unlisted.id,
        model=unlisted.model,
        spec=spec,
        prompt_tokens=unlisted.prompt_tokens,
        tokens_held=unlisted.tokens_held,
        seconds=seconds,
    )


def note_prompt(conn: Conn, completion_id: UUID, prompt_tokens: int) -> None:
    """Note how many tokens the prompts of a running Completion have, now that they are counted."""
    conn.execute(
        "UPDATE completions SET prompt_tokens = %s WHERE id = %s AND state = 'running'",
        [prompt_tokens, completion_id],
    )


def _store(
    conn: Conn,
    account_id: UUID,
    completion_id: UUID,
    *,
    model: str,
    spec: dict[str, Any],
    prompt_tokens: int,
    tokens_held: int,
    seconds: float,
) -> None:
    stored = conn.execute(
        """
        INSERT INTO completions (id, account_id, model, spec, prompt_tokens, tokens_held, deadline)
        VALUES (%(id)s, %(account_id)s, %(model)s, %(spec)s, %(prompt_tokens)s, %(tokens_held)s,
            clock_timestamp() + make_interval(secs => %(seconds)s))
        ON CONFLICT (id) DO NOTHING
        """,
        {
            "id": completion_id,
            "account_id": account_id,
            "model": model,
            "spec": Jsonb(spec),
            "prompt_tokens": prompt_tokens,
            "tokens_held": tokens_held,
            "seconds": seconds,
        },
    )
    if stored.rowcount == 1:
        place_completion_hold(conn, account_id, completion_id, tokens_held)


def claim_completion(
    conn: Conn, completion_id: UUID, worker_id: UUID, *, model: str
) -> ClaimedCompletion | None:
    """Take a Completion for one worker; None when it ended or another worker has it."""
    row = conn.execute(
        """
        UPDATE completions SET state = 'running', worker_id = %(worker_id)s,
            claimed_at = coalesce(claimed_at, clock_timestamp())
        WHERE id = %(id)s AND model = %(model)s AND deadline > clock_timestamp()
            AND (state = 'pending' OR (state = 'running' AND worker_id = %(worker_id)s))
        RETURNING id, account_id, spec,
            extract(epoch FROM deadline - clock_timestamp())::float8 AS seconds_left
        """,
        {"id": completion_id, "worker_id": worker_id, "model": model},
    ).fetchone()
    if row is None:
        return None
    stored = row["spec"]
    specs = tuple(map(spec_from_json, stored.get("prompts", ())))
    body = orjson.loads(stored["body"]) if "body" in stored else None
    return ClaimedCompletion(
        row["id"], row["account_id"], specs, stored["stream"], body, row["seconds_left"]
    )


def succeed_completion(
    conn: Conn, completion_id: UUID, worker_id: UUID, completion_tokens: int
) -> bool:
    """End and charge a Completion; False when it ended otherwise before, or its time is over."""
    if _end(
        conn,
        completion_id,
        CompletionState.succeeded,
        tokens=completion_tokens,
        worker_id=worker_id,
    ):
        return True
    row = conn.execute(
        "SELECT 1 FROM completions WHERE id = %s AND state = 'succeeded' AND worker_id = %s",
        [completion_id, worker_id],
    ).fetchone()
    return row is not None  # a commit whose answer was lost


def fail_completion(
    conn: Conn, completion_id: UUID, failure: Failure, *, worker_id: UUID | None = None
) -> bool:
    """End a Completion that cannot be answered and release its Hold; False when it had ended.

    With `worker_id`, only if that worker has it.
    """
    return _end(conn, completion_id, CompletionState.errored, failure=failure, worker_id=worker_id)


def cancel_completion(
    conn: Conn,
    completion_id: UUID,
    *,
    generated: int | None = None,
    worker_id: UUID | None = None,
) -> bool:
    """End a Completion whose client left, or did not read its stream; False when it had ended.

    Released in full, or charged P + `generated`: the tokens that were made for a stream. With
    `worker_id`, only if that worker has it.
    """
    return _end(
        conn, completion_id, CompletionState.cancelled, tokens=generated, worker_id=worker_id
    )


def withdraw_completion(conn: Conn, completion_id: UUID) -> bool:
    """End a Completion whose client left before a worker took it; False when one has."""
    return _end(conn, completion_id, CompletionState.cancelled, before=CompletionState.pending)


def read_ending(conn: Conn, completion_id: UUID) -> Ending | None:
    """Say where a Completion stands; None when there is no such row."""
    row = conn.execute(
        "SELECT state, error_code, error_message, error_param FROM completions WHERE id = %s",
        [completion_id],
    ).fetchone()
    if row is None:
        return None
    failed = row["error_code"] is not None
    return Ending(
        CompletionState(row["state"]),
        Failure(row["error_code"], row["error_message"], row["error_param"]) if failed else None,
    )


def still_running(conn: Conn, worker_id: UUID, completion_ids: Collection[UUID]) -> set[UUID]:
    """List those of these Completions that a worker should go on with."""
    rows = conn.execute(
        """
        SELECT id FROM completions WHERE id = ANY(%s) AND worker_id = %s AND state = 'running'
            AND deadline > clock_timestamp()
        """,
        [list(completion_ids), worker_id],
    )
    return {row["id"] for row in rows}


def end_overdue(conn: Conn, *, completion_id: UUID | None = None, limit: int = ENDED_MAX) -> int:
    """End Completions whose time is over, that nobody took, or whose worker is lost; count them.

    With `completion_id`, look at that one alone.
    """
    rows = conn.execute(
        """
        SELECT completions.id, CASE WHEN deadline <= clock_timestamp() THEN 'deadline_exceeded'
            WHEN completions.state = 'pending' THEN 'not_taken' ELSE 'worker_lost' END AS code
        FROM completions LEFT JOIN workers ON workers.id = completions.worker_id
        WHERE completions.finished_at IS NULL
            AND (%(id)s::uuid IS NULL OR completions.id = %(id)s::uuid)
            AND (deadline <= clock_timestamp()
                OR (completions.state = 'pending' AND completions.created_at
                    < clock_timestamp() - make_interval(secs => %(claim)s))
                OR (completions.state = 'running' AND (workers.id IS NULL
                    OR workers.state = 'gone' OR workers.heartbeat_at
                        < clock_timestamp() - make_interval(secs => %(silent)s))))
        ORDER BY completions.id LIMIT %(limit)s FOR UPDATE OF completions SKIP LOCKED
        """,
        {
            "id": completion_id,
            "claim": CLAIM_SECONDS,
            "silent": WORKER_SILENT_SECONDS,
            "limit": limit,
        },
    ).fetchall()
    ended = 0
    for row in rows:
        code: str = row["code"]
        late = code == "deadline_exceeded"
        state = CompletionState.expired if late else CompletionState.errored
        ended += _end(conn, row["id"], state, failure=Failure(code, FAILURES[code]))
    return ended


def _end(
    conn: Conn,
    completion_id: UUID,
    state: CompletionState,
    *,
    tokens: int | None = None,
    failure: Failure | None = None,
    worker_id: UUID | None = None,
    before: CompletionState | None = None,
) -> bool:
    """Move a row to a final state and resolve its Hold; False when it may not move there.

    With `before`, only from that state.
    """
    values: dict[str, Any] = {
        "id": completion_id,
        "state": state.value,
        "before": states_before(state) if before is None else [before.value],
        "tokens": tokens,
        "code": None if failure is None else failure.code,
        "message": None if failure is None else failure.message,
        "param": None if failure is None else failure.param,
        "worker_id": worker_id,
    }
    row = conn.execute(
        """
        UPDATE completions SET state = %(state)s, spec = NULL, finished_at = clock_timestamp(),
            completion_tokens = %(tokens)s::bigint, error_code = %(code)s,
            error_message = %(message)s, error_param = %(param)s,
            tokens_charged = CASE WHEN %(tokens)s::bigint IS NULL
                THEN 0 ELSE least(prompt_tokens + %(tokens)s::bigint, tokens_held) END
        WHERE id = %(id)s AND state = ANY(%(before)s)
            AND (%(worker_id)s::uuid IS NULL OR worker_id = %(worker_id)s::uuid)
            AND (%(state)s <> 'succeeded' OR deadline > clock_timestamp())
        RETURNING prompt_tokens
        """,
        values,
    ).fetchone()
    if row is None:
        return False
    charge = None if tokens is None else row["prompt_tokens"] + tokens
    resolve_completion_hold(conn, completion_id, charge)
    return True
