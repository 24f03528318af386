"""The evaluator of alert rules agrees with Prometheus' own documentation on what rules use."""

import pytest

from tests.metrics.promql import Scrape, evaluate, fires


def scrape(at: float, **values: float) -> Scrape:
    """A scrape of `name__label_value=number`."""
    samples = {}
    for text, number in values.items():
        name, *labels = text.split("__")
        pairs = frozenset((pair.split("_")[0], pair.split("_")[1]) for pair in labels)
        samples[name, pairs] = number
    return Scrape(at, samples)


NOW = [scrape(0, up__job_tiller=0, w__m_a__i_x=3, w__m_a__i_y=5, w__m_b__i_x=0, r__s_a=2, n=4)]


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ('up{job="tiller"} == 0', {("job=tiller",): 0}),
        ('up{job="other"} == 0', {}),
        ("max by (m) (w) > 0", {("m=a",): 5}),
        ("min by (m) (w)", {("m=a",): 3, ("m=b",): 0}),
        ("sum(w)", {(): 8}),
        ('sum(w{m!~"b|c", i=~"x"})', {(): 3}),
        ("n > 3", {(): 4}),
        ("n > 2 * 3", {}),
        ("max(n / n) > 0.85", {(): 1}),
        ("0.5 * sum(w)", {(): 4}),
        ("n > 0.5 * sum(w)", {}),
        ("n >= 0.5 * sum(w)", {(): 4}),
        ("absent(n)", {}),
        ("absent(nothing)", {(): 1}),
        ("n > 9 or absent(nothing)", {(): 1}),
        ("n > 1 or n > 9", {(): 4}),
        ("max by (m) (w) unless on (m) max by (m) (w) > 0", {("m=b",): 0}),
        ("w unless on (m) max by (m) (w) > 0", {("i=x", "m=b"): 0}),
    ],
)
def test_an_expression_has_its_answer(expression, answer):
    found = evaluate(expression, NOW)
    assert {tuple(sorted("=".join(pair) for pair in k)): v for k, v in found.items()} == answer


def test_a_rate_is_the_increase_a_second_within_its_range():
    history = [scrape(0, c=0), scrape(600, c=10), scrape(660, c=40)]
    assert evaluate("rate(c[5m])", history) == {frozenset(): 0.5}
    assert evaluate("rate(c[5m])", history[:1]) == {}


def test_an_alert_fires_when_its_answer_has_stayed_for_its_time():
    flapping = [scrape(at, n=at // 60 % 2) for at in range(0, 600, 30)]
    assert fires("n > 0", 30, flapping)
    assert not fires("n > 0", 31, flapping)
    assert fires("n > 0", 0, flapping)
    moving = [scrape(at, **{f"n__i_{at // 60 % 2}": 1}) for at in range(0, 600, 30)]
    assert not fires("n > 0", 60, moving), "each label set counts alone"


@pytest.mark.parametrize(
    "expression", ["avg(n)", "n + 1", "n > 0 and n > 1", "n[5m]", "n ? 1", "("]
)
def test_what_is_not_understood_is_refused(expression):
    with pytest.raises((ValueError, AssertionError)):
        evaluate(expression, NOW)
