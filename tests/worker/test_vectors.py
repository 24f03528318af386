"""The vector shelf: numbers are fetched once, kept while used, trimmed and fetched again."""

import numpy as np
import pytest

from app.steering.vectors import Vector, store_vectors
from worker.engine.vectors import VectorCache
from worker.vectors import VectorShelf

NUMBERS = 64


@pytest.fixture
def account_id(builders):
    return builders.an_account()


def stored(database, account_id, count):
    """Store vectors that all differ; return their numbers by name."""
    made = {}
    for index in range(count):
        numbers = np.full(NUMBERS, index + 1, dtype="<f4")
        vector = Vector("float32", (NUMBERS,), numbers.tobytes())
        made[vector.name] = numbers
    with database.transaction() as conn:
        vectors = [Vector("float32", (NUMBERS,), n.tobytes()) for n in made.values()]
        store_vectors(conn, account_id, vectors)
    return made


def read(folder, name):
    content = (folder / f"{name}.npy").read_bytes()
    return np.frombuffer(content[-4 * NUMBERS :], dtype="<f4")


def test_vectors_are_fetched_by_name_and_unknown_ones_left_out(database, account_id, tmp_path):
    made = stored(database, account_id, 100)
    shelf = VectorShelf(database, VectorCache(tmp_path), tmp_path, 10**6)
    shelf.take(account_id, {*made, "sv_" + "0" * 64})
    assert {path.stem for path in tmp_path.glob("*.npy")} == set(made)
    for name, numbers in made.items():
        np.testing.assert_array_equal(read(tmp_path, name), numbers)


def test_vectors_of_another_account_are_not_fetched(database, builders, account_id, tmp_path):
    made = stored(database, account_id, 1)
    shelf = VectorShelf(database, VectorCache(tmp_path), tmp_path, 10**6)
    shelf.take(builders.an_account(name="another"), set(made))
    assert not list(tmp_path.glob("*.npy"))


def test_a_full_shelf_drops_what_nobody_uses_and_fetches_it_again(database, account_id, tmp_path):
    made = stored(database, account_id, 10)
    names = sorted(made)
    file_bytes = NUMBERS * 4 + 128
    shelf = VectorShelf(database, VectorCache(tmp_path), tmp_path, 4 * file_bytes)
    used = set(names[:2])
    shelf.take(account_id, used)
    shelf.take(account_id, set(names[2:]))
    shelf.give_back(set(names[2:]))
    left = {path.stem for path in tmp_path.glob("*.npy")}
    assert used <= left
    assert len(left) == 4
    shelf.take(account_id, set(names))
    for name in names:
        np.testing.assert_array_equal(read(tmp_path, name), made[name])
