"""Dependencies point one way, and the heavy libraries have one door each."""

import pytest

from tests.rules.source_tree import ROOT, imports, sources

# A layer may import the layers named before it, and those of its own row.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("kit", "errors", "settings"),
    ("accounts", "catalog", "ledger", "storage", "steering", "queue"),
    ("completions",),
    ("jobs",),
    ("results", "vectors"),
    ("files", "batches", "webhooks", "experiments", "reconcile", "admin"),
    ("main", "health", "metrics", "query", "check", "verify"),
    ("stack",),
    ("__main__",),
)
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}

# Reads of other features that go against the direction, each with its reason.
EXCEPTIONS: dict[tuple[str, str], str] = {}

ONLY_HERE = {
    "vllm": ("worker.engine",),
    "celery": ("app.queue", "worker.celery_worker", "worker.__main__"),
    "kombu": ("app.queue", "worker.celery_worker"),
    "redis": ("app.queue", "app.completions.line", "app.stack.redis", "worker"),
    "limits": ("app.accounts.rate",),
    "alembic": ("app.kit.migrate", "migrations"),
    "sqlalchemy": ("app.kit.migrate", "migrations"),
    "transformers": ("worker",),
    "torch": ("worker",),
    "huggingface_hub": ("worker.models",),
}


def _feature(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "app" and len(parts) > 1 else None


@pytest.mark.parametrize("source", sources("app"), ids=lambda source: source.name)
def test_app_modules_import_only_what_lies_before_them(source):
    feature = _feature(source.module)
    if feature is None:
        return
    assert feature in ROW, f"{source.name}: give the feature {feature!r} its place in LAYERS"
    for module, line in imports(source):
        other = _feature(module)
        if other is None or other not in ROW or (feature, other) in EXCEPTIONS:
            continue
        where = f"{source.name}:{line} imports {module}"
        assert ROW[other] <= ROW[feature], f"{where}: {other} comes after {feature}"


@pytest.mark.parametrize("source", sources("app", "tiller", "migrations"), ids=lambda s: s.name)
def test_nothing_but_the_worker_imports_the_worker(source):
    for module, line in imports(source):
        assert module.split(".")[0] != "worker", f"{source.name}:{line} imports {module}"


@pytest.mark.parametrize("source", sources("tiller"), ids=lambda source: source.name)
def test_the_client_package_imports_no_server_code(source):
    for module, line in imports(source):
        assert module.split(".")[0] not in ("app", "migrations"), f"{source.name}:{line}: {module}"


@pytest.mark.parametrize(
    "source", sources("app", "worker", "tiller", "migrations"), ids=lambda source: source.name
)
def test_heavy_libraries_have_one_door_each(source):
    for module, line in imports(source):
        allowed = ONLY_HERE.get(module.split(".")[0])
        if allowed is None:
            continue
        inside = any(
            source.module == door or source.module.startswith(f"{door}.") for door in allowed
        )
        assert inside, f"{source.name}:{line} imports {module}; only {', '.join(allowed)} may"


def test_the_parity_reference_imports_nothing_of_the_service():
    for source in sources("tests"):
        if not source.module.startswith("tests.reference"):
            continue
        for module, line in imports(source):
            assert module.split(".")[0] not in ("app", "worker", "vllm"), f"{source.name}:{line}"


def test_every_layer_that_exists_is_listed_once():
    assert len(ROW) == sum(len(names) for names in LAYERS)
    for folder in (ROOT / "app").iterdir():
        if folder.is_dir() and (folder / "__init__.py").exists():
            assert folder.name in ROW
