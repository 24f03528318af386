"""How requests become terminal: their states, their Holds and the Job's counters, together.

Every function here runs in a transaction that has locked the Job's row, and ends with the
account's row (ledger.holds.apply_resolution). Nothing else makes a request terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from app.jobs.records import Job, RequestResult
from app.jobs.states import RequestState
from app.kit.db import Conn
from app.ledger.holds import (
    Charge,
    Resolution,
    apply_resolution,
    release_holds,
    settle_holds,
)


@dataclass(frozen=True, slots=True)
class Span:
    """Requests [first_index, end_index) of a Job, and which attempt ran them."""

    first_index: int
    end_index: int
    attempt: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """What the Job's counters must learn; tokens are those of requests that succeeded."""

    states: Sequence[RequestState]
    were_running: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def end_with_results(conn: Conn, job: Job, span: Span, results: Sequence[RequestResult]) -> None:
    """Give every pending request of a leased span its result.

    Raises ValueError unless `results` holds each pending request of the span exactly once: a
    worker that forgets a request must not finish its shard.
    """
    states = [_stored_state(job, result) for result in results]
    moved = conn.execute(
        """
        UPDATE requests SET state = ended.state, completion_tokens = ended.completion_tokens,
            error_code = ended.error_code, error_message = ended.error_message,
            attempt = %(attempt)s, finished_at = now()
        FROM unnest(%(indices)s::integer[], %(states)s::text[], %(tokens)s::integer[],
                %(codes)s::text[], %(messages)s::text[])
            AS ended (request_index, state, completion_tokens, error_code, error_message)
        WHERE requests.job_id = %(job_id)s AND requests.request_index = ended.request_index
            AND requests.state = 'pending'
            AND requests.request_index >= %(first)s AND requests.request_index < %(end)s
        RETURNING requests.request_index, requests.prompt_tokens
        """,
        {
            "job_id": job.id,
            "first": span.first_index,
            "end": span.end_index,
            "attempt": span.attempt,
            "indices": [result.request_index for result in results],
            "states": states,
            "tokens": [result.completion_tokens for result in results],
            "codes": [result.error_code for result in results],
            "messages": [result.error_message for result in results],
        },
    ).fetchall()
    if len(moved) != len(results) or _any_pending(conn, job.id, span):
        msg = (
            f"{len(results)} results do not match the pending requests "
            f"{span.first_index}..{span.end_index - 1} of Job {job.id}"
        )
        raise ValueError(msg)
    prompt_tokens = {row["request_index"]: row["prompt_tokens"] for row in moved}
    charges = [
        Charge(result.request_index, prompt_tokens[result.request_index] + tokens)
        for result in results
        if (tokens := result.completion_tokens) is not None
    ]
    unserved = [r.request_index for r in results if r.state is not RequestState.succeeded]
    resolution = settle_holds(conn, job.account_id, job.id, charges)
    resolution += release_holds(conn, job.account_id, job.id, unserved)
    served = sum(prompt_tokens[charge.request_index] for charge in charges)
    ended = _Ended(states, len(results), served, sum(c.tokens for c in charges) - served)
    _count_ended(conn, job.id, ended, resolution)
    apply_resolution(conn, job.account_id, resolution)


def stop_pending(conn: Conn, job: Job) -> int:
    """End the requests of every shard that no worker has, as cancelled or expired; count them.

    Leased shards are left to their workers, who see the flag at their next heartbeat.
    """
    stopped = conn.execute(
        """
        UPDATE requests SET state = %(state)s, finished_at = now()
        FROM shards
        WHERE shards.job_id = %(job_id)s AND shards.state = 'pending'
            AND requests.job_id = %(job_id)s AND requests.state = 'pending'
            AND requests.request_index >= shards.first_index
            AND requests.request_index < shards.end_index
        RETURNING requests.request_index
        """,
        {"state": job.stopped_as, "job_id": job.id},
    ).fetchall()
    conn.execute(
        """
        UPDATE shards SET state = 'done', finished_at = now()
        WHERE job_id = %s AND state = 'pending'
        """,
        [job.id],
    )
    indices = [row["request_index"] for row in stopped]
    resolution = release_holds(conn, job.account_id, job.id, indices)
    _count_ended(conn, job.id, _Ended([job.stopped_as] * len(indices)), resolution)
    apply_resolution(conn, job.account_id, resolution)
    return len(indices)


def _stored_state(job: Job, result: RequestResult) -> RequestState:
    """Check one result; a stopped request is stored as what stopped its Job."""
    state = RequestState(result.state)
    if state is RequestState.cancelled:
        if not job.is_stopping:
            msg = f"request {result.request_index} is cancelled, but its Job {job.id} is not"
            raise ValueError(msg)
        state = job.stopped_as
    elif state not in (RequestState.succeeded, RequestState.errored):
        msg = f"request {result.request_index} cannot end as {state}"
        raise ValueError(msg)
    has_tokens, has_error = result.completion_tokens is not None, result.error_code is not None
    fits = has_tokens == (state is RequestState.succeeded)
    if not fits or has_error != (state is RequestState.errored):
        msg = f"request {result.request_index} is {state}, which its other fields contradict"
        raise ValueError(msg)
    return state


def _any_pending(conn: Conn, job_id: UUID, span: Span) -> bool:
    row = conn.execute(
        """
        SELECT EXISTS (
            SELECT 1 FROM requests WHERE job_id = %s AND state = 'pending'
                AND request_index >= %s AND request_index < %s
        ) AS found
        """,
        [job_id, span.first_index, span.end_index],
    ).fetchone()
    return bool(row and row["found"])


def _count_ended(conn: Conn, job_id: UUID, ended: _Ended, resolution: Resolution) -> None:
    conn.execute(
        """
        UPDATE jobs SET
            n_running = n_running - %(running)s,
            n_succeeded = n_succeeded + %(succeeded)s,
            n_errored = n_errored + %(errored)s,
            n_cancelled = n_cancelled + %(cancelled)s,
            n_expired = n_expired + %(expired)s,
            prompt_tokens = prompt_tokens + %(prompt_tokens)s,
            completion_tokens = completion_tokens + %(completion_tokens)s,
            tokens_held = tokens_held - %(held)s,
            tokens_charged = tokens_charged + %(charged)s,
            tokens_released = tokens_released + %(released)s,
            sequence = sequence + 1
        WHERE id = %(job_id)s
        """,
        {
            "job_id": job_id,
            "running": ended.were_running,
            "succeeded": ended.states.count(RequestState.succeeded),
            "errored": ended.states.count(RequestState.errored),
            "cancelled": ended.states.count(RequestState.cancelled),
            "expired": ended.states.count(RequestState.expired),
            "prompt_tokens": ended.prompt_tokens,
            "completion_tokens": ended.completion_tokens,
            "held": resolution.held,
            "charged": resolution.charged,
            "released": resolution.released,
        },
    )
