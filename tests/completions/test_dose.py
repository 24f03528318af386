"""The dose warning: an add that is longer than a typical row, and nothing else."""

import numpy as np
import pytest

from app.completions.dose import DOSE, Doses
from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Intervention, Op, Site
from app.steering.vectors import Vector

# Rows of norms 5 and 10, in 2 numbers.
VECTOR = Vector("float32", (2, 2), np.array([[3, 4], [6, 8]], dtype="<f4").tobytes())
NORMS = (4.0, 20.0, 100.0)


def an_add(**fields) -> Intervention:
    known = {"op": Op.add, "site": Site.resid_post, "layer": 1, "vector": VECTOR.name, "row": 0}
    return Intervention(**{**known, **fields})


def warnings(*items: Intervention, norms=NORMS, before: tuple[str, ...] = ()) -> tuple[str, ...]:
    doses = Doses(norms, {}, {VECTOR.name: VECTOR})
    spec = RequestSpec((1, 2), None, Sampling(), interventions=items, warnings=before)
    first, again = doses.warned(spec), doses.warned(spec)
    assert first == again
    return first.warnings


@pytest.mark.parametrize(
    ("fields", "is_above"),
    [
        ({"scale": 4.0}, False),
        ({"scale": 4.1}, True),
        ({"scale": -4.1}, True),
        ({"scale": 2.1, "row": 1}, True),
        ({"scale": 2.1}, False),
        ({"scale": 2.1, "positions": (3, 7)}, True),
        ({"scale": 1.0, "layer": 0}, True),
        ({"scale": 1.0, "site": Site.resid_pre}, True),
        ({"scale": 0.5, "site": Site.resid_pre}, False),
        ({"scale": 1e6, "site": Site.resid_pre, "layer": 0}, False),
        ({"scale": 4.1, "site": Site.resid_mid}, True),
        ({"scale": 1e6, "site": Site.attn_out}, False),
        ({"scale": 1.0, "norm_match": True}, False),
        ({"scale": 1.5, "norm_match": True}, True),
        ({"scale": 1.5, "norm_match": True, "site": Site.mlp_out}, False),
        ({"op": Op.replace, "scale": 1e6}, False),
        ({"scale": 1e6, "spans": ()}, False),
    ],
)
def test_an_add_beyond_the_typical_norm_is_warned_of(fields, is_above):
    assert warnings(an_add(**fields)) == ((DOSE,) if is_above else ())


def test_one_of_several_is_enough_and_other_warnings_stay():
    items = (an_add(scale=0.1), an_add(scale=50.0))
    assert warnings(*items, before=("double_bos",)) == ("double_bos", DOSE)
    assert warnings(before=("double_bos",)) == ("double_bos",)


def test_without_known_norms_only_norm_match_can_be_told():
    assert warnings(an_add(scale=1e6), norms=None) == ()
    assert warnings(an_add(scale=1.01, norm_match=True), norms=None) == (DOSE,)
