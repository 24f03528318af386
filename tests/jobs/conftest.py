"""The API fixture, for what POST /v1/jobs stores."""

from tests.fixtures.api import api

__all__ = ["api"]
