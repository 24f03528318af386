"""Fixtures of every test: a real Postgres and Redis, and a fresh database for each test.

The suite runs in several processes (pytest-xdist), each with servers of its own. The tests of a
file stay together, so that what they share is started once; a folder whose tests share more says
so with the mark `xdist_group`.
"""

import os

import pytest

from tests.fixtures.builders import builders
from tests.fixtures.servers import (
    database,
    database_url,
    guardian,
    object_store_url,
    postgres,
    redis_server,
    redis_url,
    template_database,
)

__all__ = [
    "builders",
    "database",
    "database_url",
    "guardian",
    "object_store_url",
    "postgres",
    "redis_server",
    "redis_url",
    "template_database",
]

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread each: vLLM would pin the threads of every process to the same cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
