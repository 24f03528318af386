import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.tiny_model import make_tiny_llama
from worker.models.add import add_wheel_model
from worker.models.settings import load_fetch_settings


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny model, as transformers saves it."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, converted once on this machine."""
    cache = load_fetch_settings().cache_dir
    return add_wheel_model("smollm2-135m", tmp_path_factory.mktemp("data"), cache=cache)


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    """A models.toml that lists one model; `bare_model` is its folder."""
    bare_model(tmp_path / "models" / "bare")
    file = tmp_path / "models.toml"
    file.write_text('[models.bare]\npath = "models/bare"\ndtype = "float32"\n')
    return file


def bare_model(folder: Path, **config: object) -> Path:
    """Write the least that a model's folder may hold."""
    folder.mkdir(parents=True)
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 4,
        "max_position_embeddings": 32,
        "eos_token_id": [1, 3],
    }
    (folder / "config.json").write_text(json.dumps(sizes | config))
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True, "single_word": False}
            | {"lstrip": False, "rstrip": False, "normalized": False}
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    save_file({"weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    return folder
