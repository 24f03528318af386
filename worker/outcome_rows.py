"""Rows of one request's outcome, of which is known that they fit into a results file.

They are made as soon as the outcome is there: what a file cannot hold then errors its own request,
and nothing is left that could fail while the rows of others are written.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from app.results.rows import Row, RowFacts, RowName, asked_columns, check_outcome, row_without_text
from app.results.schema import RESIDUAL_STREAM
from worker.outcomes import Choice, Errored, Outcome, Succeeded, TokenLogprob, Work

NOT_WRITABLE = "result_not_writable"
MESSAGE_CHARS_MAX = 2000
_UNWRITABLE = (pa.ArrowException, ValueError, TypeError, OverflowError)


def writable_rows(
    name: RowName,
    facts: RowFacts,
    outcome: Outcome,
    *,
    refuse: Callable[[Succeeded], Errored | None],
    cancelled_as: str,
) -> tuple[Outcome, list[Row]]:
    """Give the outcome that counts, and its rows.

    It is the outcome that was given, unless that one has something that a results file cannot
    hold, or `refuse` finds something wrong: then it is an Errored. `cancelled_as` is the status of
    a Cancelled one.
    """
    if isinstance(outcome, Succeeded):
        refused = refuse(outcome)
        if refused is None:
            try:
                rows = succeeded_rows(name, facts, outcome)
                for row in rows:
                    check_outcome(row)
            except _UNWRITABLE as error:
                message = f"The result cannot be written into a results file: {error}"
                refused = Errored(NOT_WRITABLE, message)
            else:
                return outcome, rows
        outcome = refused
    now = datetime.now(UTC)
    if isinstance(outcome, Errored):
        outcome = Errored(_plain(outcome.code), _plain(outcome.message))
        told = (outcome.code, outcome.message)
        return outcome, [row_without_text(name, facts, "errored", error=told, finished_at=now)]
    return outcome, [row_without_text(name, facts, cancelled_as, finished_at=now)]


def _plain(text: str) -> str:
    """Replace what neither Postgres nor Parquet takes: NUL and lone surrogates; keep it short."""
    text = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    return text if len(text) <= MESSAGE_CHARS_MAX else text[: MESSAGE_CHARS_MAX - 1] + "…"


def succeeded_rows(name: RowName, facts: RowFacts, outcome: Succeeded) -> list[Row]:
    """Give a request's rows, one a choice, in order of the choice's index."""
    asked = asked_columns(name, facts)
    activations = _activation_columns(outcome)
    rows = []
    for choice in sorted(outcome.choices, key=lambda choice: choice.index):
        sampling = name.spec.sampling
        prompt_once = name.spec.prompt_tokens if choice.index == 0 else 0
        rows.append(
            {
                **asked,
                **_choice_columns(choice),
                **activations,
                "status": "succeeded",
                "seed": None if sampling.seed is None else sampling.seed + choice.index,
                "held_tokens": prompt_once + sampling.max_tokens,
                "charged_tokens": prompt_once + len(choice.token_ids),
                "prompt_logprobs": _prompt_logprobs(outcome),
                "started_at": _moment(outcome.started_at),
                "finished_at": _moment(outcome.finished_at),
            }
        )
    return rows


def _choice_columns(choice: Choice) -> Row:
    top = choice.top_logprobs
    return {
        "choice_index": choice.index,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "token_logprobs": choice.token_logprobs,
        "top_logprobs": None if top is None else [_alternatives(token) for token in top],
        "completion_tokens": len(choice.token_ids),
    }


def _activation_columns(outcome: Succeeded) -> Row:
    for capture in outcome.captures:
        if capture.name == RESIDUAL_STREAM and capture.layers:
            layers = sorted(capture.layers)
            return {
                "activation_layers": layers,
                "activation_rows": len(capture.positions),
            }
    return {}


def _prompt_logprobs(outcome: Succeeded) -> list[list[dict[str, Any]] | None] | None:
    if outcome.prompt_logprobs is None:
        return None
    return [None if token is None else _alternatives(token) for token in outcome.prompt_logprobs]


def _alternatives(token: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    return [
        {"token_id": item.token_id, "token": item.token, "logprob": item.logprob} for item in token
    ]


def _moment(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def memory_bytes(work: Work, outcome: Outcome) -> int:
    """Estimate what waiting rows of an outcome hold in memory, captures apart."""
    size = 2000 + 8 * work.spec.prompt_tokens
    if isinstance(outcome, Succeeded):
        listed = outcome.prompt_logprobs or ()
        alternatives = sum(len(token) for token in listed if token)
        for choice in outcome.choices:
            size += 1000 + 4 * len(choice.text) + 16 * len(choice.token_ids)
            alternatives += sum(map(len, choice.top_logprobs or ()))
        size += 300 * alternatives  # a dictionary with a text and two numbers
    return size
