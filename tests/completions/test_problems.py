"""Names that other services have for a field of ours lead to it."""

import pytest

from app.completions import at, captures, rows_of, steering
from app.completions.problems import OTHER_NAMES, unknown_field
from app.completions.validate import Validator
from app.jobs import schemas


@pytest.mark.parametrize(("name", "ours"), OTHER_NAMES.items(), ids=list(OTHER_NAMES))
def test_a_name_of_others_leads_to_a_field_that_is_there(
    validator: Validator, name: str, ours: tuple[str, ...]
) -> None:
    places = [at.FIELDS, captures.FIELDS, rows_of.FIELDS, steering.FIELDS]
    places += [validator.fields, schemas.FIELDS]
    said = [unknown_field(name, known, of="It") for known in places if name not in known]
    for field in ours:
        assert any(f"Did you mean {field!r}?" in each for each in said), field


def test_a_conversation_has_to_be_written_out(validator: Validator) -> None:
    said = unknown_field("messages", validator.fields, of="A completions body")
    assert "Did you mean 'prompt'?" in said
    assert "chat template" in said


def test_what_is_like_nothing_is_left_out() -> None:
    assert unknown_field("zzz", at.FIELDS, of="at") == "at has no field 'zzz'. Leave it out."
