"""Tiny random models of every family that can be steered, made on the spot from their configs.

Weights are drawn larger than real ones and norms and biases are not at their neutral values, so
that layers, tokens and positions differ clearly: a wrong position or a left-out factor shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from tests.engine.tiny_model import tiny_tokenizer

VOCAB: Final = 256
CONTEXT: Final = 512
HEADS: Final = 4
HEAD_DIM: Final = 32


@dataclass(frozen=True)
class Family:
    """A family by the names of its transformers classes; `changes` are keys of its config."""

    name: str
    architecture: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    width: int = 64
    layers: int = 3
    heads: int = HEADS
    head_dim: int = HEAD_DIM
    kv_heads: int = HEADS
    spread: float = 0.16

    @property
    def z_width(self) -> int:
        return self.heads * self.head_dim

    def block_bytes(self, tokens: int) -> int:
        """Return the size of a float32 KV block of `tokens` tokens, all layers together."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4 * tokens


def _sizes(*, width: int, layers: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT,
    }


def _family(
    name: str,
    architecture: str,
    config: str,
    *,
    width: int = 64,
    layers: int = 3,
    kv_heads: int = 2,
    spread: float = 0.16,
    **changes: Any,
) -> Family:
    sizes = _sizes(width=width, layers=layers, kv_heads=kv_heads)
    if width != HEADS * HEAD_DIM:
        sizes["head_dim"] = HEAD_DIM
    return Family(
        name,
        architecture,
        config,
        {**sizes, **changes},
        width=width,
        layers=layers,
        kv_heads=kv_heads,
        spread=spread,
    )


_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "GPT2Config",
    {
        "n_embd": 128,
        "n_layer": 2,
        "n_head": HEADS,
        "n_positions": CONTEXT,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    width=128,
    layers=2,
    spread=0.12,
)


def _gpt_neox(name: str, *, parallel: bool) -> Family:
    return _family(
        name,
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        width=128,
        layers=2,
        kv_heads=HEADS,
        spread=0.12,
        use_parallel_residual=parallel,
    )


FAMILIES: Final = {
    family.name: family
    for family in (
        _family("llama", "LlamaForCausalLM", "LlamaConfig", spread=0.14),
        _family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", width=128, spread=0.1),
        _family("qwen3", "Qwen3ForCausalLM", "Qwen3Config"),
        _family(
            "gemma3",
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            query_pre_attn_scalar=HEAD_DIM,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        _family("mistral", "MistralForCausalLM", "MistralConfig", spread=0.14, sliding_window=None),
        _family(
            "mixtral",
            "MixtralForCausalLM",
            "MixtralConfig",
            layers=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        _family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            layers=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        ),
        _family("phi3", "Phi3ForCausalLM", "Phi3Config", width=128, layers=2, spread=0.12),
        _family("olmo2", "Olmo2ForCausalLM", "Olmo2Config", width=128, layers=2, spread=0.12),
        _GPT2,
        _gpt_neox("gpt_neox", parallel=True),
        _gpt_neox("gpt_neox_serial", parallel=False),
    )
}


def make_tiny_model(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Write a tiny model of a family and its tokenizer to `folder` and return it."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, family.config)(
        vocab_size=VOCAB,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=family.spread,
        **family.changes,
    )
    torch.manual_seed(crc32(name.encode()) + seed)
    model = getattr(transformers, family.architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    disable_progress_bar()
    model.to(dtype).save_pretrained(folder, safe_serialization=True)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return folder
