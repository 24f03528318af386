"""The list of mutants keeps up with the code: every change applies, every test is there."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.listing import Mutant, read_mutants, source_of
from tests.rules.source_tree import ROOT

MUTANTS = read_mutants()
TESTS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_is_still_python(mutant: Mutant) -> None:
    text = source_of(mutant)
    changed = mutant.applied(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for name in mutant.tests:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, TESTS)}
        assert function in names or not function, name


def test_names_are_distinct() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
