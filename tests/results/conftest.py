"""The workbench, and the API on the same database and store."""

from pathlib import Path

import pytest

from app.kit.db import Database
from tests.fixtures.api import api
from tests.fixtures.away import store_away
from tests.fixtures.builders import Builders
from tests.results.workbench import Workbench

__all__ = ["api", "bench", "store_away"]


@pytest.fixture
def bench(database: Database, builders: Builders, tmp_path: Path) -> Workbench:
    """A workbench on the test's own database and store."""
    return Workbench(database, builders, tmp_path)
