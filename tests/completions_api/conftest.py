from tests.completions_api.served import served
from tests.fixtures.api import api

__all__ = ["api", "served"]
