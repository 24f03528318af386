"""One validator for the tests that only read from it."""

from pathlib import Path

import pytest

from app.completions.validate import Validator
from tests.completions.models import a_validator


@pytest.fixture
def validator(tmp_path: Path) -> Validator:
    return a_validator(tmp_path)
