"""Reads the body of POST /v1/jobs into a JobOrder; the requests in it are not judged here.

A request is a completions body with an optional `custom_id` beside its fields, or
{"custom_id", "body": {...}}. `defaults` are merged under every request, field by field; null in
a request takes a default back.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.completions.problems import Problem, is_int, shown, unknown_fields
from app.jobs.errors import InvalidJobError
from app.settings import Limits

PRIORITIES = {"interactive": 0, "standard": 1, "background": 2}
FIELDS = frozenset(
    {
        "model",
        "requests",
        "defaults",
        "name",
        "metadata",
        "priority",
        "expires_in",
        "reproducible",
    }
)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What a user asks for; `requests` and `defaults` as they were sent."""

    model: str
    requests: list[Any]
    defaults: dict[str, Any]
    name: str | None
    metadata: dict[str, str]
    priority: int
    expires_in: int | None
    reproducible: bool = False


def read_order(sent: Mapping[str, Any], limits: Limits) -> JobOrder:
    """Read the Job's own fields. Raises InvalidJobError with everything that is wrong in them."""
    problems = unknown_fields(sent, FIELDS, of="A Job")
    problems += _check_model(sent.get("model"))
    problems += _check_requests(sent.get("requests"), limits)
    problems += check_name(sent.get("name"), limits)
    problems += check_metadata(sent.get("metadata"), limits)
    defaults = sent.get("defaults")
    if defaults is not None and not isinstance(defaults, dict):
        problems.append(Problem("defaults", f"defaults must be an object, not {shown(defaults)}."))
    elif defaults is not None and not {"custom_id", "body"}.isdisjoint(defaults):
        message = "defaults may hold fields of a completions body only, not custom_id or body."
        problems.append(Problem("defaults", message))
    priority = sent.get("priority")
    priority = "standard" if priority is None else priority
    if not isinstance(priority, str) or priority not in PRIORITIES:
        message = f"priority must be one of {', '.join(PRIORITIES)}, not {shown(priority)}."
        problems.append(Problem("priority", message))
    expires_in = sent.get("expires_in")
    least, most = limits.expires_seconds_min, limits.expires_seconds_max
    if expires_in is not None and not (is_int(expires_in) and least <= expires_in <= most):
        message = f"expires_in must be {least} to {most} seconds, not {shown(expires_in)}."
        problems.append(Problem("expires_in", message))
    reproducible = sent.get("reproducible")
    if reproducible is not None and not isinstance(reproducible, bool):
        message = f"reproducible must be true or false, not {shown(reproducible)}."
        problems.append(Problem("reproducible", message))
    if problems:
        raise InvalidJobError(
            [(None, p) for p in problems[: limits.errors_reported]], len(problems)
        )
    return JobOrder(
        model=sent["model"],
        requests=sent["requests"],
        defaults=defaults or {},
        name=sent.get("name"),
        metadata=sent.get("metadata") or {},
        priority=PRIORITIES[priority],
        expires_in=expires_in,
        reproducible=bool(reproducible),
    )


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a Job: its completions body with the defaults under it, and its name."""

    custom_id: str | None
    body: dict[str, Any]
    problems: tuple[Problem, ...] = ()


def read_items(order: JobOrder, limits: Limits) -> Iterator[Item]:
    """Give every request with the defaults merged, in order."""
    for sent in order.requests:
        yield _item(sent, order, limits)


def _item(sent: Any, order: JobOrder, limits: Limits) -> Item:
    if not isinstance(sent, dict):
        return Item(None, {}, (Problem(None, f"A request must be an object, not {shown(sent)}."),))
    problems: tuple[Problem, ...] = ()
    body = sent
    if "body" in sent:
        problems += tuple(
            Problem(name, f"Beside body a request may hold custom_id only, not {name[:100]!r}.")
            for name in sent
            if name not in ("body", "custom_id")
        )
        body = sent["body"]
        if not isinstance(body, dict):
            wrong = Problem("body", f"body must be an object, not {shown(body)}.")
            return Item(None, {}, (*problems, wrong))
    body = {**order.defaults, **body}
    custom_id = body.pop("custom_id", None) if "body" not in sent else sent.get("custom_id")
    if custom_id is not None and not _is_custom_id(custom_id, limits):
        message = (
            f"custom_id must be a string of 1 to {limits.custom_id_chars} printable characters, "
            f"not {shown(custom_id)}."
        )
        problems += (Problem("custom_id", message),)
        custom_id = None
    model = body.get("model")
    if model is not None and model != order.model:
        message = f"model is {shown(model)}, but the Job's is {shown(order.model)}; leave it out."
        problems += (Problem("model", message),)
    return Item(custom_id, body, problems)


def _is_custom_id(value: object, limits: Limits) -> bool:
    return (
        isinstance(value, str) and 0 < len(value) <= limits.custom_id_chars and value.isprintable()
    )


def _check_model(model: object) -> list[Problem]:
    if isinstance(model, str):
        return []
    what = "model is missing" if model is None else f"model must be a string, not {shown(model)}"
    return [Problem("model", f"{what}. GET /v1/models lists the models.")]


def _check_requests(requests: object, limits: Limits) -> list[Problem]:
    if not isinstance(requests, list):
        what = "is missing" if requests is None else f"must be a list, not {shown(requests)}"
        return [Problem("requests", f"requests {what}. Send a list of completions bodies.")]
    if not 0 < len(requests) <= limits.requests_per_job:
        message = (
            f"requests holds {len(requests)} requests; 1 to {limits.requests_per_job} are allowed."
        )
        return [Problem("requests", message)]
    return []


def check_name(name: object, limits: Limits) -> list[Problem]:
    """List what is wrong with a name; None is none."""
    if name is None or (isinstance(name, str) and 0 < len(name) <= limits.name_chars):
        return []
    message = f"name must be a string of 1 to {limits.name_chars} characters, not {shown(name)}."
    return [Problem("name", message)]


def check_metadata(metadata: object, limits: Limits) -> list[Problem]:
    """List what is wrong with metadata, pairs of texts; None is none."""
    if metadata is None:
        return []
    if not isinstance(metadata, dict):
        return [Problem("metadata", f"metadata must be an object, not {shown(metadata)}.")]
    if len(metadata) > limits.metadata_pairs:
        message = f"metadata holds {len(metadata)} pairs; {limits.metadata_pairs} are allowed."
        return [Problem("metadata", message)]
    for key, value in metadata.items():
        if not 0 < len(key) <= limits.metadata_key_chars:
            message = f"metadata has the key {shown(key)}; 1 to {limits.metadata_key_chars} "
            return [Problem("metadata", message + "characters are allowed.")]
        if not isinstance(value, str) or len(value) > limits.metadata_value_chars:
            message = (
                f"metadata[{shown(key)}] must be a string of at most "
                f"{limits.metadata_value_chars} characters, not {shown(value)}."
            )
            return [Problem("metadata", message)]
    return []
