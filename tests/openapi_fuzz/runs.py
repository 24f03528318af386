"""Runs schemathesis over a service and keeps what it saw: answers, streams, links walked, failed
checks."""

import json
import re
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from hypothesis.errors import HypothesisWarning
from jsonschema import Draft202012Validator
from schemathesis import Case, CheckContext, Config, Response
from schemathesis.engine import from_schema
from schemathesis.engine.events import EngineEvent, EngineFinished, NonFatalError, ScenarioFinished
from schemathesis.engine.recorder import ScenarioRecorder

from app.kit.openapi import Schema
from tests.openapi_fuzz.service import Service

REQUEST_ID = re.compile("req_[0-9a-f]{32}")
REQUEST_SECONDS = 60
DONE = "data: [DONE]"
PHASES = ("examples", "coverage", "fuzzing", "stateful")
# Left out, and why; all other checks of schemathesis run.
LEFT_OUT = {
    # What a body may be also depends on its other fields, its prompt and the balance: a schema
    # cannot say that P + M must fit. That requests are taken is shown by the answers counted.
    "positive_data_acceptance": {"enabled": False},
    # It needs the keys of two accounts; tests/api/test_paths.py asks every route with both.
    "object_level_authorization": {"enabled": False},
}


@dataclass
class Seen:
    """What a run saw."""

    seed: int
    answers: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    links: Counter[str] = field(default_factory=Counter)  # walked with a value, by operations
    streams: Counter[str] = field(default_factory=Counter)  # answered, by how they ended
    failures: dict[str, str] = field(default_factory=dict)  # the first of each kind

    @property
    def requests(self) -> int:
        """Count the requests that were answered."""
        return sum(counter.total() for counter in self.answers.values())

    def table(self) -> str:
        """Write how often each operation gave each status, and which links were walked."""
        lines = [f"seed {self.seed}: {self.requests} requests, streams {dict(self.streams)}"]
        lines += [
            f"{name:50} {sorted(self.answers[name].items())}" for name in sorted(self.answers)
        ]
        return "\n".join((*lines, *(f"{count:6} {link}" for link, count in self.links.items())))

    def report(self) -> str:
        """Say what failed, and how to see it again."""
        found = "\n\n".join(f"{kind}\n{what}" for kind, what in self.failures.items())
        return f"run again with TILLER_SCHEMATHESIS_SEED={self.seed}\n\n{found}"


@schemathesis.check
def answered_in_our_form(ctx: CheckContext, response: Response, case: Case) -> None:
    """Every answer has its id in the header, and every refusal is the envelope with that id."""
    del ctx, case
    (request_id,) = response.headers.get("x-request-id", ["none"])
    assert REQUEST_ID.fullmatch(request_id), f"x-request-id is {request_id!r}"
    if response.status_code >= 400 and response.request.method != "HEAD":
        content = json.loads(response.content)
        assert content["request_id"] == request_id
        error = content["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert error["message"].endswith((".", "?", ")")), error["message"]


@schemathesis.check
def streamed_in_our_form(ctx: CheckContext, response: Response, case: Case) -> None:
    """A stream is chunks as the document has them and [DONE], or ends with the client's error."""
    del ctx
    if not _is_stream(response):
        return
    lines = [line for line in response.content.decode().split("\n\n") if line]
    *lines, end = [line for line in lines if not line.startswith(":")]
    assert all(line.startswith("data: {") for line in lines), lines
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    chunk_of = Draft202012Validator(
        {
            "$ref": "#/components/schemas/CompletionChunk",
            "components": case.operation.schema.raw_schema["components"],
        }
    )
    for chunk in chunks:
        chunk_of.validate(chunk)
    assert len({chunk["id"] for chunk in chunks}) <= 1, "one Completion has one id"
    if end == DONE:
        _check_whole(chunks)
        return
    error = json.loads(end.removeprefix("data: "))["error"]
    assert error["type"] == "invalid_request_error", f"the stream broke: {error}"


def _check_whole(chunks: list[dict[str, Any]]) -> None:
    """Check that every choice ended, once and last, and what comes behind them all."""
    ends: dict[int, str | None] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert ends.get(choice["index"]) is None, "a choice went on after its end"
        ends[choice["index"]] = choice["finish_reason"]
    assert sorted(ends) == list(range(len(ends)))
    assert ends, "there is no choice"
    assert None not in ends.values(), "a choice has no end"
    *earlier, last = chunks
    assert not any("activations" in chunk for chunk in earlier)
    if (usage := last.get("usage")) is not None:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def _is_stream(response: Response) -> bool:
    (kind,) = response.headers.get("content-type", [""])
    return kind.startswith("text/event-stream")


def run(service: Service, document: Schema, seen: Seen, *, phases: set[str], examples: int) -> None:
    """Send what schemathesis makes of a document; phases that draw do so `examples` times."""
    config = Config.from_dict(
        {
            "seed": seen.seed,
            "base-url": service.address,
            "headers": {"Authorization": f"Bearer {service.key}"},
            "request-timeout": REQUEST_SECONDS,
            "continue-on-failure": True,
            "generation": {"max-examples": examples, "no-shrink": True, "database": "none"},
            "phases": {
                **{phase: {"enabled": phase in phases} for phase in PHASES},
                # Only the links that the document has: guessed ones would hide that one is missing.
                "stateful": {"enabled": "stateful" in phases, "inference": {"algorithms": []}},
            },
            "checks": LEFT_OUT,
        }
    )
    engine = from_schema(schemathesis.openapi.from_dict(document, config=config))
    with warnings.catch_warnings():
        # An error in a generator would only make it flaky: Hypothesis warns of a body too long
        # to be shown.
        warnings.simplefilter("ignore", HypothesisWarning)
        for event in engine.execute():
            _note(seen, event)


def _note(seen: Seen, event: EngineEvent) -> None:
    if isinstance(event, ScenarioFinished):
        _count(seen, event.recorder)
    elif isinstance(event, NonFatalError):
        seen.failures[f"{event.label}: {event.info.title}"] = event.info.message
    elif isinstance(event, EngineFinished):
        assert event.stop_reason == "completed", event.stop_reason


def _count(seen: Seen, recorder: ScenarioRecorder) -> None:
    for case_id, interaction in recorder.interactions.items():
        node = recorder.cases[case_id]
        operation = node.value.operation.label
        if interaction.response is None:
            seen.failures[f"{operation}: no answer"] = str(interaction.request)
            continue
        seen.answers[operation][interaction.response.status_code] += 1
        if _is_stream(interaction.response):
            is_whole = interaction.response.content.decode().endswith(f"{DONE}\n\n")
            seen.streams["whole" if is_whole else "broken off"] += 1
        if node.transition is not None and node.is_transition_applied:
            seen.links[node.transition.id] += 1
    for case_id, checks in recorder.checks.items():
        for check in checks:
            if check.failure_info is None:
                continue
            failure = check.failure_info.failure
            operation = recorder.cases[case_id].value.operation.label
            kind = f"{operation}: {check.name}: {failure.title}"
            shown = (failure.message, check.failure_info.code_sample, _answer(recorder, case_id))
            seen.failures.setdefault(kind, "\n".join(shown))


def _answer(recorder: ScenarioRecorder, case_id: str) -> str:
    response = recorder.find_response(case_id=case_id)
    return (
        "no answer" if response is None else f"{response.status_code} {response.content[:1000]!r}"
    )
