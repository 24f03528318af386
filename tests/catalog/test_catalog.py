"""What models.toml promises is what the catalog serves, and what it cannot serve is refused."""

import dataclasses

import pytest

from app.catalog import CatalogError, load_catalog
from app.catalog.models_file import ModelEntry, add_model, read_models_file
from app.errors import ModelNotFoundError
from app.steering.spec import Site
from tests.catalog.conftest import bare_model


def test_a_model_is_read_from_its_folder(models_file):
    model = load_catalog(models_file).get("bare")
    assert model.path == (models_file.parent / "models/bare").resolve()
    assert (model.hidden_size, model.n_layers, model.vocab_size) == (8, 2, 4)
    assert (model.max_model_len, model.dtype, model.mode) == (32, "float32", "eager")
    assert (model.bos_id, model.eos_ids, model.special_token_ids) == (0, (1, 3), (0, 1, 3))
    assert model.architecture == "LlamaForCausalLM"
    assert model.describe_sites()["resid_post"] == {"width": 8}
    assert set(model.sites) == set(Site)
    assert model.listed


def test_a_model_over_tensor_ranks_has_no_heads_and_one_over_stages_has_all(models_file):
    text = models_file.read_text()
    models_file.write_text(text + "tensor_parallel_size = 2\n")
    model = load_catalog(models_file).get("bare")
    assert (model.tensor_parallel_size, model.pipeline_parallel_size) == (2, 1)
    assert set(model.sites) == set(Site) - {Site.z}
    models_file.write_text(text + "pipeline_parallel_size = 2\n")
    assert set(load_catalog(models_file).get("bare").sites) == set(Site)


def test_a_served_model_cannot_be_changed(models_file):
    model = load_catalog(models_file).get("bare")
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.hidden_size = 9


def test_an_unknown_model_is_answered_with_the_listed_ones(models_file):
    bare_model(models_file.parent / "hidden")
    add_model(models_file, "secret", ModelEntry(path="hidden", listed=False))
    catalog = load_catalog(models_file)
    with pytest.raises(ModelNotFoundError) as caught:
        catalog.get("nope")
    assert "'nope'" in caught.value.message
    assert "bare" in caught.value.message
    assert "secret" not in caught.value.message
    assert caught.value.param == "model"
    assert catalog.get("secret").listed is False
    assert [model.name for model in catalog.listed()] == ["bare"]
    assert [model.name for model in catalog.all()] == ["bare", "secret"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("max_seqs = 4", "max_seqs"),
        ('dtype = "float16"', "dtype"),
        ('mode = "fast"', "mode"),
        ("max_num_seqs = 0", "max_num_seqs"),
        ('max_model_len = "32"', "max_model_len"),
        ("max_model_len = 33", "over the model's 32"),
        ('path = "nowhere"', "nowhere"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(models_file, line, named):
    base = [] if line.startswith("path") else ['path = "models/bare"']
    models_file.write_text("\n".join(["[models.bare]", *base, line, ""]))
    with pytest.raises(CatalogError, match=named):
        load_catalog(models_file)


@pytest.mark.parametrize("text", ["", "[models]\n", "models = 3\n", "[model.a]\n", "[models.\n"])
def test_a_file_without_models_is_refused(models_file, text):
    models_file.write_text(text)
    with pytest.raises(CatalogError):
        load_catalog(models_file)


@pytest.mark.parametrize("name", ["", "../up", "a/b/c", "a b", "-x", "x" * 97, "a\n"])
def test_a_name_that_could_be_a_path_is_refused(models_file, name):
    with pytest.raises(CatalogError):
        add_model(models_file, name, ModelEntry(path="models/bare"))


def test_an_entry_that_was_fetched_nowhere_yet_says_how_to_fetch_it(models_file):
    models_file.write_text('[models.far]\nhub = "someone/far"\n')
    with pytest.raises(CatalogError, match="tiller models add far --hub someone/far"):
        load_catalog(models_file)


def test_adding_a_model_keeps_what_a_person_wrote(models_file):
    models_file.write_text("# ours\n" + models_file.read_text())
    entry = ModelEntry(path='odd "name"\\folder', max_num_seqs=7, listed=False)
    assert add_model(models_file, "org/other", entry) is True
    assert models_file.read_text().startswith("# ours\n[models.bare]\n")
    assert read_models_file(models_file)["org/other"] == entry
    assert add_model(models_file, "org/other", entry) is False
    with pytest.raises(CatalogError, match="already has a model"):
        add_model(models_file, "org/other", ModelEntry(path="elsewhere"))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_needed_file_is_refused(models_file, missing):
    (models_file.parent / "models/bare" / missing).unlink()
    with pytest.raises(CatalogError, match=missing.replace("model.safetensors", "safetensors")):
        load_catalog(models_file)
