"""The API fixture."""

from tests.fixtures.api import api

__all__ = ["api"]
