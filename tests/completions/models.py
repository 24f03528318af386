"""A model to validate against, without a folder for most tests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.catalog import ServedModel, load_catalog
from app.completions.rows_of import RowsOf
from app.completions.spec import RequestSpec
from app.completions.validate import Validator
from app.settings import Limits
from app.steering.vectors import Vector
from tests.fixtures.tiny_model import write_tiny_model


def a_validator(
    folder: Path,
    *,
    limits: Limits | None = None,
    is_job: bool = True,
    stored: Mapping[str, Vector] | None = None,
    captured: Mapping[RowsOf, Vector | str] | None = None,
    **fields: Any,
) -> Validator:
    """Build a validator of the tiny model; `fields` change the model."""
    catalog = load_catalog(write_tiny_model(folder))
    model: ServedModel = replace(catalog.get("tiny"), **fields)
    tokenizer = catalog.tokenizer("tiny")
    return Validator(
        model,
        tokenizer,
        limits or Limits(),
        stored={} if stored is None else stored,
        is_job=is_job,
        captured={} if captured is None else captured,
    )


def spec_of(validator: Validator, **body: Any) -> RequestSpec:
    """Validate one body that must be good."""
    (outcome,) = validator.check([{"prompt": "hi", **body}])
    assert isinstance(outcome, RequestSpec), outcome
    return outcome


def problem_of(validator: Validator, **body: Any) -> tuple[str | None, str]:
    """Validate one body that must have exactly one problem; give its param and message."""
    (outcome,) = validator.check([{"prompt": "hi", **body}])
    assert isinstance(outcome, list), outcome
    (problem,) = outcome
    return problem.param, problem.message
