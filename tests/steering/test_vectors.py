"""Stored vectors: one copy an account, found by content, private."""

import threading

import numpy as np
import pytest

from app.kit.db import Database
from app.steering.vectors import (
    Vector,
    digest_of,
    find_vector,
    find_vectors,
    read_vectors,
    store_vectors,
)
from tests.fixtures.builders import Builders


def a_vector(value: float = 1.0, shape: tuple[int, ...] = (2, 4)) -> Vector:
    return Vector("float32", shape, np.full(shape, value, dtype="<f4").tobytes())


def test_a_name_depends_on_dtype_shape_and_bytes() -> None:
    vector = a_vector()
    others = [
        a_vector(2.0),
        Vector("float32", (4, 2), vector.data),
        Vector("bfloat16", (4, 4), vector.data),
        Vector("float32", (8,), vector.data),
    ]
    assert len({vector.name, *(other.name for other in others)}) == 5
    assert digest_of(vector.name) == vector.digest


@pytest.mark.parametrize("name", ["", "sv_", "sv_" + "0" * 63, "sv_" + "A" * 64, "0" * 64])
def test_other_texts_are_no_names(name: str) -> None:
    assert digest_of(name) is None


def test_the_same_numbers_are_stored_once_and_read_back(
    database: Database, builders: Builders
) -> None:
    account, other = builders.an_account(), builders.an_account()
    vectors = [a_vector(number) for number in range(3)]
    for _ in range(2):
        with database.transaction() as conn:
            store_vectors(conn, account, [*vectors, *vectors])
    with database.transaction() as conn:
        names = [vector.name for vector in vectors]
        assert find_vectors(conn, account, names) == {v.name: v for v in vectors}
        assert find_vectors(conn, other, names) == {}
        assert find_vector(conn, account, "sv_" + "0" * 64) is None
        numbers = read_vectors(conn, account, names[:1])[names[0]]
        assert numbers.shape == (2, 4)


def test_two_jobs_with_the_same_vectors_never_block_each_other_for_ever(
    database: Database, builders: Builders
) -> None:
    account = builders.an_account()
    vectors = [a_vector(number) for number in range(40)]
    barrier = threading.Barrier(4)
    failures: list[Exception] = []

    def store(own: list[Vector]) -> None:
        barrier.wait()
        try:
            with database.transaction() as conn:
                store_vectors(conn, account, own)
        except Exception as error:  # noqa: BLE001 (shown by the assertion)
            failures.append(error)

    orders = [vectors, vectors[::-1]] * 2
    threads = [threading.Thread(target=store, args=[own]) for own in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_bfloat16_is_widened_exactly() -> None:
    bits = np.array([0x3F80, 0xC020, 0x0001], dtype="<u2")
    vector = Vector("bfloat16", (3,), bits.tobytes())
    assert vector.to_float32()[:2].tolist() == [1.0, -2.5]
    assert vector.largest == 2.5
