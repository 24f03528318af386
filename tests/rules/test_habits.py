"""Mistakes that are cheaper to forbid than to find: by syntax tree, in all of our code."""

import ast
import re

import pytest

from tests.rules.source_tree import ROOT, imports, sources, tracked_files

CODE = pytest.mark.parametrize(
    "source", sources("app", "worker", "tiller", "migrations"), ids=lambda source: source.name
)
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "handler"}
EXECUTES = {"execute", "executemany", "copy", "stream"}
# A client that freezes inside a pipeline (executemany is one) leaves its locks to nobody: the
# server waits for the rest, and no timeout of Postgres counts that wait.
PIPELINES = {"executemany", "pipeline"}
NAIVE_CALLS = {
    "datetime.utcnow",
    "datetime.utcfromtimestamp",
    "datetime.datetime.utcnow",
    "datetime.datetime.utcfromtimestamp",
    "datetime.date.today",
    "date.today",
}


def _calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@CODE
def test_nothing_is_unpickled(source):
    for module, line in imports(source):
        assert module.split(".")[0] not in UNSAFE_MODULES, f"{source.name}:{line}: {module}"
    for name, call in _calls(source.tree):
        assert name not in ("torch.load", "np.load", "numpy.load"), f"{source.name}:{call.lineno}"


@CODE
def test_no_datetime_is_naive(source):
    for name, call in _calls(source.tree):
        where = f"{source.name}:{call.lineno} {name}"
        assert name not in NAIVE_CALLS, f"{where} has no time zone"
        if name in ("datetime.now", "datetime.datetime.now", "datetime.fromtimestamp"):
            given = len(call.args) >= (2 if name.endswith("fromtimestamp") else 1)
            assert given or any(k.arg == "tz" for k in call.keywords), f"{where} has no time zone"


@CODE
def test_no_statement_is_sent_in_parts(source):
    for name, call in _calls(source.tree):
        assert name.rsplit(".", 1)[-1] not in PIPELINES, f"{source.name}:{call.lineno} {name}"


# What a page shows belongs together: the counts of a Job, and the requests that they count.
@pytest.mark.parametrize("source", sources("app/admin"), ids=lambda source: source.name)
def test_a_page_of_the_dashboard_is_read_at_one_moment(source):
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(each).startswith("router.get(") for each in node.decorator_list
        ):
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
                name = ast.unparse(call.func)
                assert name not in ("database.run", "database.transaction"), (
                    f"{source.name}:{call.lineno} {name}: use database.read"
                )


# Migrations may repeat a statement for names of their own; no value from outside reaches them.
@pytest.mark.parametrize("source", sources("app", "worker"), ids=lambda source: source.name)
def test_sql_is_literal_text(source):
    for name, call in _calls(source.tree):
        if name.rsplit(".", 1)[-1] not in EXECUTES or not call.args:
            continue
        query = call.args[0]
        built = isinstance(query, ast.JoinedStr | ast.BinOp) or (
            isinstance(query, ast.Call)
            and ast.unparse(query.func).endswith(".format")
            and isinstance(query.func, ast.Attribute)
            and isinstance(query.func.value, ast.Constant | ast.JoinedStr)
        )
        assert not built, f"{source.name}:{call.lineno} builds SQL from strings; bind parameters"


@CODE
def test_no_module_or_class_has_a_vague_name(source):
    words = set(re.split(r"[_.]", source.module.lower()))
    assert not words & VAGUE_NAMES, f"{source.name}: say what it does"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            parts = {word.lower() for word in re.findall(r"[A-Z][a-z]+", node.name)}
            assert not parts & VAGUE_NAMES, f"{source.name}:{node.lineno} {node.name}"


@CODE
def test_only_settings_read_the_environment(source):
    if source.module in ENVIRONMENT_READERS:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            assert not (isinstance(node.value, ast.Name) and node.value.id == "os"), (
                f"{source.name}:{node.lineno} reads the environment"
            )


# Whoever starts another process, or a library that is configured by variables alone.
ENVIRONMENT_READERS = {
    "app.stack.up": "children get our environment and the stack's variables",
    "worker.models.convert": "tells the hub client to stay offline, before it is imported",
    "worker.engine.environment": "vLLM is configured by variables that must be set before import",
    "worker.engine.vllm_engine": "the engine process inherits its number of threads",
    "worker.failpoints": "fault tests choose the place of death in a process that they start",
}


@CODE
def test_nothing_waits_for_its_turn(source):
    for name, call in _calls(source.tree):
        assert name != "os.system", f"{source.name}:{call.lineno}"
        shell = any(
            keyword.arg == "shell" and getattr(keyword.value, "value", None) is not False
            for keyword in call.keywords
        )
        assert not shell, f"{source.name}:{call.lineno} runs a shell"
    for marker in ("TODO", "FIXME", "XXX", "HACK"):
        assert not re.search(rf"\b{marker}\b", source.text), f"{source.name} has a {marker}"


# Written in pieces, so that this file does not contain what it looks for.
PRIVATE = (
    "/" + "work/",
    "/root" + "/",
    "/home" + "/",
    "/tmp" + "/proto",
    "pypi" + ".org",
    "files.pythonhosted" + ".org",
    "download.pytorch" + ".org",
    "/opt" + "/wheels",
    "/opt" + "/pypi",
    "huggingface" + ".co/",
    "registry.npmjs" + ".org",
)
PUBLIC_TEXT = {".py", ".md", ".toml", ".txt", ".lock", ".yaml", ".yml", ".json", ".mako", ".cfg"}


def test_no_file_names_a_private_path_or_a_registry_host():
    found = []
    for path in tracked_files():
        if path.suffix not in PUBLIC_TEXT and path.name not in ("Makefile", "run", "Dockerfile"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in PRIVATE if word in text]
    assert not found
