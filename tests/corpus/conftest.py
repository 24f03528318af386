"""One API for the whole corpus: every case must leave it as it was, so they can share it."""

import itertools
from collections.abc import Iterator

import psycopg
import pytest
from fastapi.testclient import TestClient
from psycopg import sql

from app.kit.db import Database
from app.main import create_app
from app.settings import Limits
from app.stack.postgres import EmbeddedPostgres
from app.stack.redis import EmbeddedRedis
from tests.fixtures.api import UNHURRIED, Api, a_key, settings_for
from tests.fixtures.documented import Described
from tests.fixtures.servers import url_of

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def shared_api(
    postgres: EmbeddedPostgres,
    redis_server: EmbeddedRedis,
    template_database: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Api]:
    """An API whose account may have any number of unfinished Jobs."""
    name = f"corpus_{next(_numbers)}"
    with psycopg.connect(postgres.url, autocommit=True) as conn:
        conn.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY").format(
                sql.Identifier(name), sql.Identifier(template_database)
            )
        )
    url = url_of(postgres, name)
    settings = settings_for(
        tmp_path_factory.mktemp("corpus"),
        database_url=url,
        redis_url=redis_server.url,
        limits=Limits(live_jobs=1_000_000, **UNHURRIED),
    )
    database = Database(url)
    account_id, key = a_key(database)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    app = create_app(settings)
    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        client.event_hooks["response"].append(Described(app))
        yield Api(client, database, account_id, key)
    database.close()
