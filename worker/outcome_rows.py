"""Rows of a request that succeeded, one a choice, and how much memory its outcome takes."""

from datetime import UTC, datetime
from typing import Any

from app.results.rows import Row, RowFacts, RowName, asked_columns
from app.results.schema import RESIDUAL_STREAM
from worker.outcomes import Choice, Outcome, Succeeded, TokenLogprob, Work


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
                "activation_rows": len(capture.layers[layers[0]]),
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
    """Estimate what a waiting outcome holds in memory, its captured vectors apart."""
    size = 1000 + 8 * work.spec.prompt_tokens
    if isinstance(outcome, Succeeded):
        listed = outcome.prompt_logprobs or ()
        alternatives = sum(len(token) for token in listed if token)
        for choice in outcome.choices:
            size += len(choice.text) + 16 * len(choice.token_ids)
            alternatives += sum(map(len, choice.top_logprobs or ()))
        size += 150 * alternatives  # a TokenLogprob with its text and numbers
    return size
