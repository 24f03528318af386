"""POST /v1/tokenize: the tokens that a Completion or a Job would count, with their places."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.kit.db import Database
from app.main import create_app
from app.settings import Limits
from tests.fixtures.api import Api, a_key, settings_for
from tests.fixtures.documented import Described
from tests.fixtures.tiny_model import BOS, CONTEXT, EOS, VOCAB_SIZE

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


def tokens_of(api: Api, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = api.client.post("/v1/tokenize", json={"model": "tiny", "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def refused(api: Api, **body: Any) -> dict[str, Any]:
    answer = api.client.post("/v1/tokenize", json={"model": "tiny", "prompt": "a", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_text_is_shown_token_by_token(api: Api) -> None:
    found = tokens_of(api, "hé </s>")
    assert found == {
        "object": "tokens",
        "model": "tiny",
        "count": 6,
        "max_model_len": CONTEXT,
        "context_left": CONTEXT - 6,
        "token_ids": [BOS, 73, found["token_ids"][2], found["token_ids"][3], 222, EOS],
        "tokens": ["<s>", "h", "Ã", "©", "Ġ", "</s>"],
        "texts": ["<s>", "h", "\ufffd", "\ufffd", " ", "</s>"],
        # Both bytes of é stand at its one character.
        "offsets": [None, [0, 1], [1, 2], [1, 2], [2, 3], [3, 7]],
        "special_positions": [0, 5],
        "warnings": [],
    }


def test_positions_are_counted_in_characters_not_bytes(api: Api) -> None:
    text = "日本 😀x"
    found = tokens_of(api, text)
    for place, offset in enumerate(found["offsets"][1:], start=1):
        start, end = offset
        assert end == start + 1
        if text[start].isascii():
            assert found["texts"][place] == text[start:end]
    assert found["offsets"][-1] == [4, 5]


def test_special_tokens_are_added_unless_told_otherwise(api: Api) -> None:
    assert tokens_of(api, "")["token_ids"] == [BOS]
    assert tokens_of(api, "", add_special_tokens=None)["token_ids"] == [BOS]
    bare = tokens_of(api, "", add_special_tokens=False)
    assert (bare["count"], bare["context_left"], bare["offsets"]) == (0, CONTEXT, [])
    assert tokens_of(api, "a", add_special_tokens=False)["special_positions"] == []


def test_a_second_bos_is_warned_of(api: Api) -> None:
    doubled = tokens_of(api, "<s>a")
    assert (doubled["token_ids"][:2], doubled["warnings"]) == ([BOS, BOS], ["double_bos"])
    assert doubled["offsets"][:2] == [None, [0, 3]]
    assert tokens_of(api, [BOS, BOS, 5])["warnings"] == ["double_bos"]
    assert tokens_of(api, "<s>a", add_special_tokens=False)["warnings"] == []


def test_token_ids_are_shown_as_they_are(api: Api) -> None:
    found = tokens_of(api, [73, EOS, VOCAB_SIZE - 1])
    assert found["token_ids"] == [73, EOS, VOCAB_SIZE - 1]
    assert found["texts"][:2] == ["h", "</s>"]
    assert found["offsets"] == [None] * 3
    assert found["special_positions"] == [1]


def test_several_prompts_give_a_list_in_their_order(api: Api) -> None:
    prompts: list[Any] = ["a", [73, 74], "", "b"]
    found = tokens_of(api, prompts)
    assert found["object"] == "list"
    assert found["data"] == [tokens_of(api, prompt) for prompt in prompts]
    assert tokens_of(api, ["a"])["data"] == [tokens_of(api, "a")]


def test_a_prompt_over_the_context_says_by_how_much(api: Api) -> None:
    found = tokens_of(api, "a" * CONTEXT)
    assert (found["count"], found["context_left"]) == (CONTEXT + 1, -1)


def test_a_model_that_is_not_listed_can_be_asked(api: Api) -> None:
    assert tokens_of(api, "a", model="hidden")["model"] == "hidden"


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXT, add=st.booleans())
def test_a_job_counts_and_stores_the_same_tokens(api: Api, text: str, add: bool) -> None:  # noqa: FBT001
    found = tokens_of(api, text, add_special_tokens=add)
    request = {"prompt": text, "add_special_tokens": add, "max_tokens": 1}
    answer = api.submit(request)
    if found["count"] == 0 or found["context_left"] < 1:
        assert answer.status_code == 400
        return
    assert answer.json()["usage"]["held"] == found["count"] + 1
    path = f"/v1/jobs/{answer.json()['id']}/requests/0"
    assert api.client.get(path).json()["spec"]["prompt_token_ids"] == found["token_ids"]
    api.client.post(f"/v1/jobs/{answer.json()['id']}/cancel")


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"promt": "a"}, "promt", "Did you mean 'prompt'?"),
        ({"add_special_token": True}, "add_special_token", "Did you mean 'add_special_tokens'?"),
        ({"max_tokens": 1}, "max_tokens", "Leave it out."),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": 3}, "prompt", "not 3"),
        ({"prompt": {}}, "prompt", "not {}"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", 3]}, "prompt", "not 3"),
        ({"prompt": [3, "a"]}, "prompt", "prompt must be"),
        ({"prompt": [True]}, "prompt", "not true"),
        ({"prompt": [1.0]}, "prompt", "not 1.0"),
        ({"prompt": [VOCAB_SIZE]}, "prompt", f"0 to {VOCAB_SIZE - 1}"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": ["a"] * 257}, "prompt", "257 prompts were sent; at most 256"),
        ({"prompt": "a" * (512 * 1024 + 1)}, "prompt", "524289 bytes"),
        ({"prompt": ["é" * 200_000, "é" * 100_000]}, "prompt", "600000 bytes"),
        ({"prompt": [5] * (512 * 1024 + 1)}, "prompt", "at most 524288"),
        ({"model": None}, "model", "model is missing"),
        ({"model": 3}, "model", "must be a string"),
        ({"add_special_tokens": "yes"}, "add_special_tokens", "true or false"),
        ({"add_special_tokens": 1}, "add_special_tokens", "true or false"),
    ],
)
def test_what_cannot_be_tokenized_is_named(
    api: Api, body: dict[str, Any], param: str, says: str
) -> None:
    error = refused(api, **body)
    assert (error["param"], error["code"]) == (param, "invalid_request")
    assert says in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        rb'{"model": "tiny", "prompt": "\ud800"}',
        rb'{"model": "tiny", "prompt": "a\u0000b"}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "a", "prompt": "b"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 40 + b"]" * 40 + b"}",
    ],
)
def test_a_body_that_is_no_clean_json_is_refused(api: Api, raw: bytes) -> None:
    answer = api.client.post("/v1/tokenize", content=raw)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_json")


def test_an_unknown_model_and_no_key_are_told_apart(api: Api) -> None:
    body = {"model": "nope", "prompt": "a"}
    answer = api.client.post("/v1/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    stranger = api.client.post("/v1/tokenize", json=body, headers={"authorization": "Bearer x"})
    assert stranger.status_code == 401


def test_nothing_is_held_or_stored(api: Api) -> None:
    before = api.numbers()
    tokens_of(api, ["a", "b"])
    assert api.numbers() == before


@pytest.fixture
def tight(tmp_path: Path, database: Database, database_url: str, redis_url: str) -> Iterator[Api]:
    """An API that tokenizes 2 prompts of 8 bytes in all."""
    limits = Limits(tokenize_bytes=8, tokenize_prompts=2)
    served = settings_for(tmp_path, database_url=database_url, redis_url=redis_url, limits=limits)
    account_id, key = a_key(database)
    app = create_app(served)
    with TestClient(app, headers={"authorization": f"Bearer {key}"}) as client:
        client.event_hooks["response"].append(Described(app))
        yield Api(client, database, account_id, key)


def test_how_much_is_tokenized_at_once_is_a_setting(tight: Api) -> None:
    assert len(tokens_of(tight, ["a" * 6, [5, 6]])["data"]) == 2
    assert "9 bytes" in refused(tight, prompt=["a" * 6, [5, 6, 7]])["message"]
    assert "3 prompts" in refused(tight, prompt=["a"] * 3)["message"]
