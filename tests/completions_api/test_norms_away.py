"""Typical norms while Postgres is away: what is known stays, and nobody waits for long."""

import time

import pytest

from app.catalog import load_catalog, norms
from app.catalog.norms import TypicalNorms, store_norms
from app.kit.db import Database
from tests.fixtures.tiny_model import write_tiny_model

NORMS = [1.5, 2.25, 3.0, 4.125]


@pytest.fixture
def model(tmp_path):
    return load_catalog(write_tiny_model(tmp_path)).get("tiny")


def test_norms_that_cannot_be_read_are_not_known(model):
    away = Database("postgresql://127.0.0.1:1/none", wait_seconds=0.1)
    began = time.monotonic()
    assert TypicalNorms(away).of(model) is None
    assert time.monotonic() - began < 5  # it is tried once
    away.close()


def test_norms_that_were_read_once_stay_known(database_url, model, monkeypatch):
    database = Database(database_url, wait_seconds=2)
    with database.transaction() as conn:
        store_norms(conn, model, NORMS)
    typical = TypicalNorms(database)
    assert typical.of(model) == tuple(NORMS)
    with database.transaction() as conn:
        store_norms(conn, model, NORMS[::-1])
    monkeypatch.setattr(norms, "REMEMBERED_SECONDS", 0.0)
    assert typical.of(model) == tuple(NORMS[::-1]), "it is read again"
    conns = [database._pool.getconn() for _ in range(8)]  # nobody gets one any more
    assert typical.of(model) == tuple(NORMS[::-1])
    for conn in conns:
        database._pool.putconn(conn)
    database.close()
