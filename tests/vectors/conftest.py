"""The API for single tests, and one that the cases of bad uploads share."""

from tests.corpus.conftest import shared_api
from tests.fixtures.api import api

__all__ = ["api", "shared_api"]
