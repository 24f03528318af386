"""Documents cannot go stale: what they list is compared with the code."""

import pytest

from app.errors import ApiError
from tests.rules.settings_page import PAGE, SECTIONS, render


def test_every_setting_is_documented_with_its_default_and_meaning():
    hint = "write it anew: python -m tests.rules.settings_page"
    assert PAGE.read_text(encoding="utf-8") == render(), hint


@pytest.mark.parametrize("model", [section[3] for section in SECTIONS], ids=lambda m: m.__name__)
def test_every_setting_says_what_it_means(model):
    for name, field in model.model_fields.items():
        assert field.description or name == "limits", f"{model.__name__}.{name}"


def test_every_error_is_in_the_tree_of_its_module():
    import app.errors as module

    drawn = module.__doc__ or ""
    known = [ApiError]
    for error in known:
        known += error.__subclasses__()
    for error in known:
        if error.__module__ == module.__name__:
            assert error.__name__ in drawn, f"{error.__name__} is not drawn"
            assert error is ApiError or f"{error.status} {error.code}" in drawn, error.__name__
