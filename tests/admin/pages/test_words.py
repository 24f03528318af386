"""How the dashboard writes numbers, times and steering."""

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import BaseModel

from app.admin import filters
from app.admin.audit_pages import AuditEntry
from app.admin.steering_words import captures_in_words, sampling_in_words, steering_in_words
from app.admin.system_reads import shown_settings
from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import FOREVER, Capture, Intervention, Op, Reduce, Site

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\u2013"),
        (0, "0 s"),
        (0.24, "240 ms"),
        (8.24, "8.2 s"),
        (59.4, "59 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
        (4 * 86400 + 3 * 3600, "4 d 3 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds, text):
    assert filters.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (3_400_000, "3.4 M"),
        (999_499_999, "999 M"),
        (999_999_943_309, "1 T"),
        (-999_999_999, "\u22121 G"),
        (2e12, "2 T"),
    ],
)
def test_a_large_number_is_short(number, text):
    assert filters.compact(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(1023, "1023 B"), (1048575, "1 MiB"), (1024 * 1023, "1023 KiB"), (1024**3 - 1, "1 GiB")],
)
def test_a_size_never_reaches_1024_of_its_unit(number, text):
    assert filters.size(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.04, "< 0.1"), (0.05, "0.1"), (99.94, "99.9"), (99.96, "100")]
)
def test_a_rate_that_is_not_zero_does_not_look_like_it(number, text):
    assert filters.rate(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 * 2**20, "300 MiB")]
)
def test_a_size_has_the_unit_that_fits(number, text):
    assert filters.size(number) == text


@pytest.mark.parametrize(
    ("part", "text"), [(0, "0 %"), (1, "< 0.1 %"), (9999, "> 99.9 %"), (10_000, "100 %")]
)
def test_a_share_is_never_rounded_to_nothing_or_everything(part, text):
    assert filters.percent(part, 10_000) == text


@pytest.mark.parametrize(
    ("moved", "text"),
    [(0, "just now"), (-90, "1 min ago"), (7300, "in 2 h"), (-200_000, "2 d ago")],
)
def test_a_moment_is_told_relative_to_now(moved, text):
    assert filters.ago(NOW + timedelta(seconds=moved), NOW) == text


def test_an_exact_moment_is_iso_8601_in_utc():
    assert filters.exact(NOW) == "2026-05-01T12:00:00.000Z"


def steer(**fields) -> Intervention:
    usual = {"op": Op.add, "site": Site.resid_post, "layer": 2, "vector": "sv_" + "ab" * 32}
    return Intervention(**{**usual, "row": 0, **fields})  # type: ignore[arg-type]


def words(*items: Intervention) -> list[str]:
    return steering_in_words(RequestSpec((1, 2, 3), None, Sampling(), items))


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (steer(scale=4.0), "Adds 4 \u00d7 sv_abababab\u2026 at Layer 2, all positions."),
        (steer(scale=-1e-5), "Adds \u22121e-05 \u00d7 sv_"),
        (
            steer(scale=0.5, norm_match=True, summed=True),
            "Steering vector: adds 0.5 \u00d7 the norm along sv_abababab\u2026 at Layer 2, all",
        ),
        (steer(scale=0.0, spans=((0, 3),)), "the prompt (changes nothing)."),
        (steer(spans=((3, FOREVER),)), "generated tokens."),
        (steer(spans=((2, FOREVER),)), "the position predicted from."),
        (steer(positions=(1, 2, 5)), "positions 1\u20132, 5."),
        (steer(op=Op.orthogonal, coeff=0.0), "Removes the direction sv_abababab\u2026"),
        (steer(op=Op.orthogonal, coeff=0.3), "Scales the direction sv_abababab\u2026 by 0.3"),
        (steer(op=Op.cap, low=-1.0, high=2.0), "between \u22121 and 2"),
        (steer(op=Op.cap, high=2.0), "at 2 or below"),
        (steer(op=Op.replace), "Replaces by sv_abababab\u2026"),
        (steer(site=Site.z, heads=(0, 3)), "at Layer 2, z, heads 0, 3, all positions."),
    ],
)
def test_an_intervention_is_told_in_a_sentence(item, text):
    (sentence,) = words(item)
    assert text in sentence


def test_one_op_on_many_layers_is_one_sentence():
    (sentence,) = words(*(steer(layer=layer, row=layer) for layer in (4, 5, 6, 9)))
    assert "Layers 4\u20136, 9" in sentence


def test_captures_and_sampling_are_told_in_words():
    capture = Capture("probe", Site.mlp_out, (1, 2), before=True, reduce=Reduce.norm)
    spec = RequestSpec((1,), None, Sampling(max_tokens=5, temperature=0.0, seed=3), (), (capture,))
    assert captures_in_words(spec) == [
        "probe: mlp_out at Layers 1\u20132 before the interventions, norm of each row."
    ]
    assert sampling_in_words(spec.sampling) == "at most 5 tokens, temperature 0, seed 3"


class Shown(BaseModel):
    body_bytes: int = 134_217_728
    name_chars: int = 200
    wait_seconds: float = 3600.0
    lease_seconds: float = 30.0
    creates_per_minute: int = 600
    requests_max: int = 200_000
    port: int = 8400


def test_a_setting_is_shown_with_the_unit_of_its_name():
    assert {setting.name: setting.value for setting in shown_settings(Shown())} == {
        "body_bytes": "134,217,728 bytes (128 MiB)",
        "name_chars": "200 characters",
        "wait_seconds": "3,600 s (1 h)",
        "lease_seconds": "30 s",
        "creates_per_minute": "600 a minute",
        "requests_max": "200,000",
        "port": "8400",
    }


def test_a_run_of_the_invariants_is_told_in_words():
    entry = AuditEntry(
        id=1, at=NOW, key_id=None, session_id=None, name="olga", role="operator", target="",
        action="invariants.run", before=None, address=None,
        after={"true": 26, "broken": 0, "unfinished": 0},
    )  # fmt: skip
    assert entry.changes == [
        ("rules that hold", None, "26"),
        ("rules broken", None, "0"),
        ("rules not finished", None, "0"),
    ]
