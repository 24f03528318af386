"""The API fixtures."""

from tests.corpus.conftest import shared_api
from tests.fixtures.api import api

__all__ = ["api", "shared_api"]
