"""What `at` means, against a predicate of one position that is written out rule by rule."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.completions import spans
from app.completions.at import EVERYWHERE, Phase, Reach, check_reach, read_at, refuse_empty, resolve
from app.completions.problems import RefusedError
from app.steering.spec import FOREVER, Spans

SPECIAL = frozenset({0, 1})


def acts(sent: dict[str, Any], position: int, token_ids: list[int]) -> bool:
    """Say whether an `at` means a position, as the documentation says it."""
    prompt_tokens = len(token_ids)
    phases = {
        "prompt": position < prompt_tokens,
        "generated": position >= prompt_tokens,
        "all": True,
        "last": position >= prompt_tokens - 1,
    }
    chosen = phases[sent.get("phase", "all")]
    if "positions" in sent:
        chosen = position in sent["positions"]
    if "spans" in sent:
        chosen = any(start <= position < end for start, end in sent["spans"])
    if "steps" in sent:
        step = 0 if position < prompt_tokens else position - prompt_tokens + 1
        chosen = chosen and sent["steps"][0] <= step < sent["steps"][1]
    exclude = sent.get("exclude", [])
    if exclude == "special_tokens":
        return chosen and not (position < prompt_tokens and token_ids[position] in SPECIAL)
    return chosen and position not in exclude


@st.composite
def ats(draw: st.DrawFn, reach: int, steps: int) -> dict[str, Any]:
    """Draw an `at` that names nothing past `reach`."""
    position = st.integers(0, reach)
    distinct = st.lists(position, min_size=1, max_size=6, unique=True)
    sent: dict[str, Any] = {}
    form = draw(st.sampled_from(["positions", "spans", "phase", None]))
    if form == "positions":
        sent["positions"] = draw(distinct)
    elif form == "spans":
        edges = sorted(draw(st.sets(st.integers(0, reach + 1), min_size=2, max_size=8)))
        pairs = zip(edges[::2], edges[1::2], strict=False)
        sent["spans"] = draw(st.permutations([list(pair) for pair in pairs]))
    elif form == "phase":
        sent["phase"] = draw(st.sampled_from(list(map(str, Phase))))
    if draw(st.booleans()):
        sent["steps"] = sorted(draw(st.sets(st.integers(0, steps), min_size=2, max_size=2)))
    if draw(st.booleans()):
        sent["exclude"] = draw(distinct | st.just("special_tokens"))
    assume(sent)
    return sent


@settings(deadline=None)
@given(st.data())
def test_an_at_means_exactly_the_positions_that_its_parts_say(data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    max_tokens = data.draw(st.integers(1, 8))
    reach = Reach(len(token_ids), max_tokens, 1000)
    sent = data.draw(ats(reach.last, max_tokens))
    at = read_at(sent, positions_max=4096)
    check_reach(at, reach)
    found = resolve(at, len(token_ids), token_ids, SPECIAL)
    expected = [p for p in range(reach.last + 1) if acts(sent, p, token_ids)]
    assert [p for p in range(reach.last + 1) if found is None or spans.holds(found, p)] == expected
    assert found != spans.EVERYWHERE, "every position is None"
    if expected:
        refuse_empty(at, found, reach)
    elif sent.get("phase") != "generated" or max_tokens > 1:
        with pytest.raises(RefusedError, match="leaves no position"):
            refuse_empty(at, found, reach)


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ({"phase": "all"}, None),
        ({"phase": "prompt"}, ((0, 5),)),
        ({"phase": "generated"}, ((5, FOREVER),)),
        ({"phase": "last"}, ((4, FOREVER),)),
        ({"steps": [0, 1]}, ((0, 5),)),
        ({"steps": [0, 3]}, ((0, 7),)),
        ({"steps": [1, 2]}, ((5, 6),)),
        ({"steps": [2, 4]}, ((6, 8),)),
        ({"phase": "last", "steps": [0, 2]}, ((4, 6),)),
        ({"phase": "generated", "exclude": [6]}, ((5, 6), (7, FOREVER))),
        ({"exclude": "special_tokens"}, ((1, 3), (4, FOREVER))),
        ({"phase": "last", "exclude": "special_tokens"}, ((4, FOREVER),)),
        ({"positions": [6, 1, 2]}, ((1, 3), (6, 7))),
        ({"spans": [[4, 6], [0, 2], [2, 3]]}, ((0, 3), (4, 6))),
        ({"positions": None, "phase": "prompt", "exclude": None}, ((0, 5),)),
    ],
    ids=str,
)
def test_forms_of_a_prompt_of_five_tokens(sent: dict[str, Any], found: Spans | None) -> None:
    at = read_at(sent, positions_max=4096)
    assert resolve(at, 5, [0, 7, 7, 1, 7], SPECIAL) == found


def test_a_missing_at_is_everywhere_and_so_is_last_of_a_single_token() -> None:
    assert read_at(None, positions_max=4096) == EVERYWHERE
    assert resolve(EVERYWHERE, 5, [0, 0, 0, 0, 0], SPECIAL) is None
    last = read_at({"phase": "last"}, positions_max=4096)
    assert resolve(last, 1, [7], SPECIAL) is None


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "last"), [(4, 2, 4), (1, 1, 0), (60, 4, 62), (63, 1, 62)]
)
def test_every_form_may_name_the_last_position_that_runs_and_no_later_one(
    prompt_tokens: int, max_tokens: int, last: int
) -> None:
    reach = Reach(prompt_tokens, max_tokens, 64)
    assert reach.last == last
    for position in (last, last + 1):
        forms: list[dict[str, Any]] = [
            {"positions": [position]},
            {"spans": [[0, position + 1]]},
            {"exclude": [position]},
            {"phase": "generated", "exclude": [position]},
            {"steps": [0, max_tokens + position - last]},
        ]
        for sent in forms:
            at = read_at(sent, positions_max=4096)
            if position == last:
                check_reach(at, reach)
            else:
                with pytest.raises(RefusedError, match=r"reaches positions 0 to|runs steps 0 to"):
                    check_reach(at, reach)


def test_generated_with_one_token_is_taken_though_it_never_runs() -> None:
    reach = Reach(5, 1, 64)
    at = read_at({"phase": "generated"}, positions_max=4096)
    found = resolve(at, 5, [7] * 5, SPECIAL)
    assert found == ((5, FOREVER),)
    refuse_empty(at, found, reach)
    never = read_at({"phase": "generated", "steps": [0, 1]}, positions_max=4096)
    with pytest.raises(RefusedError, match="leaves no position"):
        refuse_empty(never, resolve(never, 5, [7] * 5, SPECIAL), reach)


def test_spans_may_be_capped_or_not() -> None:
    sent = {"spans": [[0, 4097]]}
    assert read_at(sent, positions_max=None).spans == ((0, 4097),)
    assert read_at({"spans": [[0, 4096]]}, positions_max=4096).spans == ((0, 4096),)
    with pytest.raises(RefusedError, match="4097 positions"):
        read_at(sent, positions_max=4096)
