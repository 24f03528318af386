"""A request's body: as few bytes as its texts have, and each thing that JSON cannot hold named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from app.kit.db import Database
from app.main import create_app
from app.settings import Limits
from tests.fixtures.api import UNHURRIED, a_key, settings_for
from tests.tiller_cli.conftest import lead_to
from tiller.client import Client
from tiller.errors import ApiError
from tiller.requests_json import to_json

CHINESE = "我认为这部电影是"
BODIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


def a_circle(kind: str) -> dict[str, Any]:
    row: Any = [1.0]
    row.append(row if kind == "list" else {"row": row})
    return {"requests": [{"prompt": row}]}


def test_a_body_has_no_spaces_and_no_escapes_that_json_does_not_need() -> None:
    sent = {"prompt": f'{CHINESE} "é"\n', "n": [1, np.int64(2)], "row": torch.ones(2), "x": None}
    told = f'{{"prompt":"{CHINESE} \\"é\\"\\n","n":[1,2],"row":[1.0,1.0],"x":null}}'
    assert to_json(sent) == told.encode()


@settings(deadline=None, max_examples=50)
@given(body=BODIES)
def test_what_is_written_is_read_back(body: Any) -> None:
    assert json.loads(to_json(body)) == body


def test_a_job_is_as_large_as_its_texts(
    database: Database, database_url: str, redis_url: str, tmp_path: Path
) -> None:
    metadata = {f"text {number}": CHINESE * 64 for number in range(16)}
    size = sum(len(key) + len(text.encode()) for key, text in metadata.items())
    limits = Limits(**UNHURRIED, body_bytes=size + 200)
    places = {"database_url": database_url, "redis_url": redis_url}
    app = create_app(settings_for(tmp_path, **places, limits=limits))
    with TestClient(app), Client("http://testserver/v1", a_key(database)[1]) as client:
        lead_to(app, client)
        job = client.create_job(model="tiny", requests=[{"prompt": "hi"}], metadata=metadata)
        assert job["metadata"] == metadata
        with pytest.raises(ApiError, match=str(size + 200)) as refused:
            client.create_job(model="tiny", requests=[{"prompt": "hi" * 100}], metadata=metadata)
    assert (refused.value.status, refused.value.code) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"x": [1.0, float("nan")]}, "NaN or infinite"),
        ({"x": np.array([np.inf])}, "NaN or infinite"),
        (a_circle("list"), "contains itself"),
        (a_circle("dictionary"), "contains itself"),
        ({"prompt": "ab\ud800c"}, "lone surrogate U+D800"),
        ({"\udfff": 1}, "lone surrogate U+DFFF"),
    ],
)
def test_what_json_cannot_hold_is_named_for_what_it_is(body: Any, told: str) -> None:
    with pytest.raises(ValueError) as refused:
        to_json(body)
    named = {"NaN or infinite", "contains itself", "lone surrogate"}
    assert told in str(refused.value)
    assert [each for each in named if each in str(refused.value)] == [
        each for each in named if told.startswith(each)
    ]


def test_the_place_of_a_lone_surrogate_is_shown() -> None:
    with pytest.raises(ValueError, match=r"""it stands after '.*"prompt":"well'"""):
        to_json({"requests": [{"prompt": "fine"}, {"prompt": "well\ud83d"}]})
