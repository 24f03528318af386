"""POST /v1/steering_vectors: every form gives the numbers that were meant, or a clear 4xx."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from app.steering.vectors import Vector
from app.vectors.npy import read_npy, write_npy
from tests.corpus.cases import encoded
from tests.fixtures.api import Api
from tests.vectors.files import (
    BAD_UPLOADS,
    NPY,
    OCTETS,
    SAFETENSORS,
    Bad,
    form,
    npy,
    npy_with,
    safetensors,
)

PATH = "/v1/steering_vectors"
VALUES = np.array([[1.0, -2.5, 3e-8], [0.0, 6.5, -1e-3]])
MANY = 2_097_152


def upload(api: Api, body: bytes, kind: str | None = OCTETS, **query: str) -> httpx.Response:
    """Post a body of some type."""
    request = api.client.build_request("POST", PATH, content=body, params=query)
    request.headers.pop("content-type", None)
    if kind is not None:
        request.headers["content-type"] = kind
    return api.client.send(request)


def content(api: Api, vector_id: str) -> Any:
    """Download the numbers, reading the file as numpy does."""
    answer = api.client.get(f"{PATH}/{vector_id}/content")
    assert answer.status_code == 200
    header = answer.content.split(b"\n")[0]
    assert len(header) % 64 == 63
    vector = read_npy(answer.content, MANY)
    return vector.to_float32()


@pytest.mark.parametrize("bad", BAD_UPLOADS, ids=lambda bad: bad.name)
def test_a_bad_upload_gets_a_clear_answer_and_stores_nothing(shared_api: Api, bad: Bad) -> None:
    before = shared_api.numbers()
    answer = upload(shared_api, bad.body, bad.content_type, **bad.query)
    shown = answer.text[:600]
    assert answer.status_code == bad.status, shown
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (bad.code, bad.param), shown
    assert bad.says in error["message"], shown
    assert len(error["message"]) < 1000
    assert shared_api.numbers() == before


GOOD_NPY = {
    "float32": npy(VALUES.astype("<f4")),
    "float32 of the other byte order": npy(VALUES.astype(">f4")),
    "float64": npy(VALUES),
    "float64 of the other byte order": npy(VALUES.astype(">f8")),
    "Fortran order": npy(np.asfortranarray(VALUES.astype("<f4"))),
    "version 2": npy(VALUES.astype("<f4"), version=(2, 0)),
    "version 3": npy(VALUES.astype("<f4"), version=(3, 0)),
    "keys in another order": npy_with(
        "{'shape': (2L, 3L), \"fortran_order\": False, 'descr': \"<f4\"}",
        VALUES.astype("<f4").tobytes(),
    ),
    "no spaces": npy_with(
        "{'descr':'<f4','fortran_order':False,'shape':(2,3)}", VALUES.astype("<f4").tobytes()
    ),
}


@pytest.mark.parametrize("name", GOOD_NPY)
def test_a_npy_file_of_floats_is_stored_as_float32(shared_api: Api, name: str) -> None:
    answer = upload(shared_api, GOOD_NPY[name], NPY)
    assert answer.status_code in (200, 201), answer.text
    stored = answer.json()
    assert (stored["dtype"], stored["shape"], stored["bytes"]) == ("float32", [2, 3], 24)
    assert np.array_equal(content(shared_api, stored["id"]), VALUES.astype("f4"))


def test_float16_is_widened_exactly(api: Api) -> None:
    half = np.array([1.5, 6e-8, -65504], "<f2")
    answer = upload(api, npy(half))
    assert answer.json()["shape"] == [3]
    assert np.array_equal(content(api, answer.json()["id"]), half.astype("f4"))


@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 3, 8)])
def test_every_form_of_the_same_numbers_is_one_vector(api: Api, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape), dtype="<f4").reshape(shape)
    file = npy(values)
    tensors = safetensors(
        {"v": ("F32", list(shape), values.tobytes())}, __metadata__={"format": "pt"}
    )
    wire = encoded(shape=list(shape))
    answers = [
        upload(api, json.dumps({"activations": values.tolist()}).encode(), "application/json"),
        upload(api, json.dumps({"activations": values.tolist()}).encode(), None),
        upload(api, file, NPY),
        upload(api, file, OCTETS),
        upload(api, tensors, SAFETENSORS),
        upload(api, tensors, OCTETS, tensor="v"),
        upload(api, form(("file", file)), "multipart/form-data; boundary=b"),
        upload(api, form(("file", tensors), ("tensor", b"v")), 'Multipart/Form-Data; boundary="b"'),
        api.client.post(PATH, files={"file": ("v.npy", file)}),
    ]
    assert [answer.status_code for answer in answers] == [201, *[200] * 8]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert api.numbers()["vectors"] == 1
    name = Vector("float32", shape, values.tobytes()).name
    assert answers[0].json()["id"] == name
    assert all(answer.headers["location"] == f"{PATH}/{name}" for answer in answers)
    assert upload(api, json.dumps({"activations": wire}).encode(), None).status_code == 201


def test_bfloat16_stays_as_it_is_and_comes_back_as_float32(api: Api) -> None:
    bits = np.array([0x3F80, 0xC020, 0x0001, 0x8000], "<u2")
    answer = upload(api, safetensors({"v": ("BF16", [2, 2], bits.tobytes())}))
    stored = answer.json()
    assert (stored["dtype"], stored["shape"], stored["bytes"]) == ("bfloat16", [2, 2], 8)
    numbers = content(api, stored["id"])
    assert numbers.view("<u4").tolist() == (bits.astype("u4") << 16).reshape(2, 2).tolist()


def test_one_tensor_of_several_is_chosen_by_its_name(api: Api) -> None:
    file = safetensors(
        {
            "a": ("F32", [2], np.array([1, 2], "<f4").tobytes()),
            "b": ("F16", [1, 2], np.array([3, 4], "<f2").tobytes()),
        }
    )
    answer = upload(api, file, SAFETENSORS, tensor="b", name="the second")
    assert answer.json()["name"] == "the second"
    assert content(api, answer.json()["id"]).tolist() == [[3, 4]]


def test_a_file_may_hold_what_looks_like_the_end_of_a_form(api: Api) -> None:
    values = np.frombuffer(b"\r\n--a--\r\n-b--\r\n\r", "<f4")
    answer = upload(api, form(("file", npy(values))), "multipart/form-data; boundary=b")
    assert answer.status_code == 201, answer.text
    assert np.array_equal(content(api, answer.json()["id"]), values)


@pytest.mark.parametrize("shape", [(1,), (5, 1), (3, 2, 7)])
def test_what_is_written_is_what_numpy_writes(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype("<f4")
    vector = Vector("float32", shape, values.tobytes())
    assert write_npy(vector) == npy(values)
