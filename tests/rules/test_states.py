"""States and moves live in one module, and the schema, that module and its drawing agree."""

import ast
import re

from app.completions.states import COMPLETION_MOVES, CompletionState
from app.jobs import states
from tests.rules.source_tree import ROOT, sources

SCHEMA = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted((ROOT / "migrations/versions").glob("*.py"))
)


def _checked_states(table: str) -> set[str]:
    body = SCHEMA.split(f"CREATE TABLE {table} (", 1)[1]
    listed = re.search(r"\bstate\s+text NOT NULL[^(]*\(\s*state IN \(([^)]*)\)", body)
    assert listed, f"{table}.state has no CHECK"
    return set(re.findall(r"'(\w+)'", listed[1]))


def test_every_state_has_its_moves():
    assert set(states.JOB_MOVES) == set(states.JobState)
    assert set(states.REQUEST_MOVES) == set(states.RequestState)
    assert set(states.SHARD_MOVES) == set(states.ShardState)
    assert set(COMPLETION_MOVES) == set(CompletionState)


def test_the_schema_allows_exactly_the_states_that_are_stored():
    assert _checked_states("jobs") == set(states.JobState)
    assert _checked_states("requests") == set(states.RequestState) - {"running"}
    assert _checked_states("shards") == set(states.ShardState)
    assert _checked_states("completions") == set(CompletionState)


def test_every_state_can_be_reached_and_terminal_is_left_by_retry_alone():
    for moves, first in (
        (states.JOB_MOVES, {states.JobState.draft}),
        (states.REQUEST_MOVES, {states.RequestState.pending}),
        (states.SHARD_MOVES, {states.ShardState.pending}),
    ):
        reached = set().union(*moves.values()) | first
        assert reached == set(moves)
    for state in states.JOB_TERMINAL:
        assert states.JOB_MOVES[state] == {states.JobState.queued}
    for state in states.REQUEST_TERMINAL:
        assert states.REQUEST_MOVES[state] <= {states.RequestState.pending}


def test_the_drawing_in_the_docstring_names_every_state():
    drawing = states.__doc__ or ""
    for state in (*states.JobState, *states.RequestState, *states.ShardState):
        assert re.search(rf"\b{state}\b", drawing), f"{state} is not drawn"


def test_no_code_assigns_a_state_to_a_row():
    for source in sources("app", "worker"):
        for node in ast.walk(source.tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                assigned = isinstance(target, ast.Attribute) and target.attr == "state"
                on_app = assigned and ast.unparse(target.value) in ("app", "request.app")
                assert not assigned or on_app, f"{source.name}:{node.lineno} assigns a state"
