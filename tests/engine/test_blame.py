"""Whose fault a failure is: what vLLM refuses is the request's, what breaks afterwards is ours."""

from collections.abc import Callable
from typing import Any

import pytest

from app.completions.sampling import BAD_WORDS_MAX
from app.completions.spec import RequestSpec, Sampling
from tests.engine.engines import run_alone
from worker.engine import pieces, sampling
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Succeeded

PROMPT = (5, 9, 17)


def request(**fields: Any) -> RequestSpec:
    return RequestSpec(PROMPT, None, Sampling(max_tokens=2, temperature=0.0, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": (" ",)},
        {"bad_words": tuple(f"w{number}" for number in range(100, 229))},
        {"allowed_token_ids": (10**6,)},
        {"temperature": -1.0},
    ],
)
def test_what_vllm_refuses_is_the_fault_of_the_request(
    engine: VllmEngine, fields: dict[str, Any]
) -> None:
    spec = RequestSpec(PROMPT, None, Sampling(**{"max_tokens": 2, "temperature": 0.0, **fields}))
    outcome = run_alone(engine, spec)
    assert isinstance(outcome, Errored)
    assert outcome.code == "invalid_request"


def _value_error(*_args: object, **_options: object) -> None:
    raise ValueError("zip() argument 2 is shorter than argument 1")


def _key_error(*_args: object, **_options: object) -> None:
    raise KeyError(17)


@pytest.mark.parametrize("breaks", [_value_error, _key_error])
@pytest.mark.parametrize(
    ("place", "name"), [(sampling, "to_logprobs"), (pieces, "to_prompt_logprobs")]
)
def test_output_that_cannot_be_read_is_our_fault(
    engine: VllmEngine,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    breaks: Callable[..., None],
) -> None:
    monkeypatch.setattr(place, name, breaks)
    outcome = run_alone(engine, request(logprobs=1, prompt_logprobs=1))
    assert isinstance(outcome, Errored)
    assert outcome.code == "engine_error"
    assert outcome.message == "The engine failed on this request."
    monkeypatch.undo()
    assert isinstance(run_alone(engine, request(logprobs=1, prompt_logprobs=1)), Succeeded)


def test_our_own_parameters_that_cannot_be_made_are_our_fault(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_logit_bias", _value_error)
    outcome = run_alone(engine, request())
    assert isinstance(outcome, Errored)
    assert outcome.code == "engine_error"


def test_as_many_bad_words_as_a_request_may_have_are_taken(engine: VllmEngine) -> None:
    words = tuple(f"w{number}" for number in range(100, 100 + BAD_WORDS_MAX))
    assert isinstance(run_alone(engine, request(bad_words=words)), Succeeded)
