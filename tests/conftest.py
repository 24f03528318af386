"""Fixtures of every test: a real Postgres and Redis, and a fresh database for each test.

The suite runs in several processes (pytest-xdist), each with servers of its own. The tests of a
file stay together, so that what they share is started once.
"""

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

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


# Folders whose tests share what is slow to start.
WHOLE_FOLDERS = ("tests/browser/", "tests/openapi_fuzz/", "tests/seed_contract/")


class ByFile(LoadScopeScheduling):
    """Gives a process whole files, and whole folders of WHOLE_FOLDERS."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in WHOLE_FOLDERS if file.startswith(folder)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Keep the tests of a file in one process."""
    return ByFile(config, log)
