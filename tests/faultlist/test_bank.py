"""A bounded table of vectors: what is in use stays, what nobody uses makes room, and no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.steering.bank import BankFullError, BlockKey, UnknownVectorError, VectorBank

WIDTH = 4


def load(name: str) -> np.ndarray:
    if name == "sv_never":
        raise UnknownVectorError(name)
    return np.full((3, WIDTH), float(name.removeprefix("sv_")), dtype=np.float32)


def key(number: int, *, rows: int = 1, unit: bool = False) -> BlockKey:
    return BlockKey(f"sv_{number}", 0, rows, unit, WIDTH, 0, WIDTH)


@pytest.fixture
def bank() -> VectorBank:
    return VectorBank(WIDTH, 4, load, torch.device("cpu"))


def rows_in(bank: VectorBank, number: int) -> list[float]:
    block = bank.acquire(key(number))
    bank.release(key(number))
    return bank.table[torch.from_numpy(block.places)].flatten().tolist()


def test_many_more_vectors_than_rows_come_and_go_and_each_is_itself(bank: VectorBank) -> None:
    for number in range(1, 300):
        assert rows_in(bank, number) == [float(number)] * WIDTH
    assert bank.blocks <= 4
    assert bank.table.shape[0] <= 4


def test_a_vector_in_use_is_never_pushed_out(bank: VectorBank) -> None:
    kept = bank.acquire(key(7))
    for number in range(8, 40):
        rows_in(bank, number)
    assert bank.table[torch.from_numpy(kept.places)].unique().tolist() == [7.0]


def test_where_everything_is_in_use_one_more_is_refused_and_nothing_moves(
    bank: VectorBank,
) -> None:
    blocks = {number: bank.acquire(key(number)) for number in (1, 2, 3, 4)}
    with pytest.raises(BankFullError):
        bank.acquire(key(5))
    for number, block in blocks.items():
        assert bank.table[torch.from_numpy(block.places)].unique().tolist() == [float(number)]
    bank.release(key(2))
    assert rows_in(bank, 5) == [5.0] * WIDTH


def test_users_share_rows_and_the_last_one_frees_them(bank: VectorBank) -> None:
    first, second = bank.acquire(key(1, rows=3)), bank.acquire(key(1, rows=3))
    assert first.places.tolist() == second.places.tolist()
    bank.release(key(1, rows=3))
    with pytest.raises(BankFullError):
        bank.acquire(key(2, rows=2))
    bank.release(key(1, rows=3))
    assert len(bank.acquire(key(2, rows=2)).places) == 2


def test_a_vector_that_is_not_there_takes_no_row(bank: VectorBank) -> None:
    unknown = key(1)._replace(vector="sv_never")
    for _ in range(10):
        with pytest.raises(UnknownVectorError):
            bank.acquire(unknown)
    assert bank.blocks == 0
    assert len([bank.acquire(key(number)) for number in (1, 2, 3, 4)]) == 4


def test_a_row_at_unit_length_is_another_block(bank: VectorBank) -> None:
    plain, unit = bank.acquire(key(3)), bank.acquire(key(3, unit=True))
    assert bank.table[torch.from_numpy(plain.places)].flatten().tolist() == [3.0] * WIDTH
    assert bank.table[torch.from_numpy(unit.places)].flatten().tolist() == [0.5] * WIDTH
