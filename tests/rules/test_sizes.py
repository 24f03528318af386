"""No file, function or parameter list grows past what one reader can hold (columns: ruff)."""

import ast

import pytest

from tests.rules.source_tree import functions, sources

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
POSITIONAL_PARAMETERS_MAX = 5

EVERY_FILE = pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)


@EVERY_FILE
def test_files_are_short(source):
    lines = source.text.count("\n") + 1
    assert lines <= FILE_LINES_MAX, f"{source.name} has {lines} lines; split it by verb"


@EVERY_FILE
def test_functions_are_short(source):
    for function in functions(source):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        where = f"{source.name}:{function.lineno} {function.name}"
        assert lines <= FUNCTION_LINES_MAX, f"{where} has {lines} lines"


@EVERY_FILE
def test_functions_take_few_positional_parameters(source):
    for function in functions(source):
        named = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        names = [name for name in named if name not in ("self", "cls")]
        if function.name.startswith("test_") or _is_fixture(function):
            continue  # pytest passes fixtures by name
        where = f"{source.name}:{function.lineno} {function.name}"
        assert len(names) <= POSITIONAL_PARAMETERS_MAX, f"{where} takes {names}; name some with *"


def _is_fixture(function):
    return any("fixture" in ast.unparse(decorator) for decorator in function.decorator_list)


@EVERY_FILE
def test_modules_say_what_lives_in_them(source):
    if source.tree.body and source.path.name != "conftest.py":
        assert ast.get_docstring(source.tree), f"{source.name} has no docstring"
