"""The tests' tiny model with weights, so that vLLM can serve what the narrowed document draws for.

Sizes, context and tokenizer are those of tests/fixtures/tiny_model.py; the weights are random.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tests.fixtures.tiny_model import (
    BOS,
    CONTEXT,
    EOS,
    HIDDEN_SIZE,
    N_LAYERS,
    VOCAB_SIZE,
    write_tiny_model,
)


def write_real_model(folder: Path) -> Path:
    """Write the model's folder and a models.toml that lists it; return the latter."""
    models_file = write_tiny_model(folder)
    model = folder / "tiny"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE * 2,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM has attention for
        max_position_embeddings=CONTEXT,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    disable_progress_bar()
    LlamaForCausalLM(config).to(torch.float32).eval().save_pretrained(
        model, safe_serialization=True
    )
    models_file.write_text(
        '[models.tiny]\npath = "tiny"\ndtype = "float32"\nmax_num_seqs = 16\n'
        "max_num_batched_tokens = 512\nkv_cache_bytes = 67108864\nthreads = 1\n",
        encoding="utf-8",
    )
    return models_file
