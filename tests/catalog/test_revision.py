"""A revision names content: it changes with the weights and with nothing else."""

import json
import os

from app.catalog import load_catalog
from app.catalog import revision as revision_module
from app.catalog.models_file import ModelEntry, add_model
from app.catalog.revision import (
    changed_files,
    is_complete,
    sha256_of,
    weights_revision,
    write_checksums,
)
from tests.catalog.conftest import bare_model


def test_equal_weights_have_equal_revisions_wherever_they_lie(tmp_path):
    one = bare_model(tmp_path / "one")
    two = bare_model(tmp_path / "two", note="another configuration")
    records = tmp_path / "records"
    first = weights_revision(one, records=records)
    assert first == weights_revision(two, records=records)
    assert first.startswith("sha256:")
    assert len(first) == len("sha256:") + 64


def test_another_weight_gives_another_revision(tmp_path):
    folder = bare_model(tmp_path / "one")
    before = weights_revision(folder, records=tmp_path / "records")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))
    assert weights_revision(folder, records=tmp_path / "records") != before


def test_weights_are_hashed_once(tmp_path, monkeypatch):
    folder = bare_model(tmp_path / "one")
    first = weights_revision(folder, records=tmp_path / "records")
    hashed = []
    monkeypatch.setattr(revision_module, "sha256_of", hashed.append)
    assert weights_revision(folder, records=tmp_path / "records") == first
    assert hashed == []


def test_recorded_checksums_of_a_made_folder_are_used(tmp_path):
    folder = bare_model(tmp_path / "one")
    before = weights_revision(folder, records=tmp_path / "records")
    write_checksums(folder)
    assert is_complete(folder)
    assert changed_files(folder) == []
    assert weights_revision(folder, records=tmp_path / "elsewhere") == before
    assert not (tmp_path / "elsewhere").exists()
    recorded = json.loads((folder / "checksums.json").read_text())["files"]
    assert recorded["model.safetensors"]["sha256"] == sha256_of(folder / "model.safetensors")


def test_a_damaged_folder_is_noticed(tmp_path):
    folder = bare_model(tmp_path / "one")
    assert not is_complete(folder)
    write_checksums(folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"?")
    assert changed_files(folder) == ["model.safetensors"]
    weights.write_bytes(content[:-1])
    assert not is_complete(folder)


def test_a_revision_in_the_file_wins(models_file):
    entry = ModelEntry(path="models/bare", revision="v7")
    add_model(models_file, "pinned", entry)
    assert load_catalog(models_file).get("pinned").revision == "v7"
