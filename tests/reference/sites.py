"""Where the sites of each family are among the modules of Hugging Face, written down by hand.

Independent of the product's own table, whose names are vLLM's: that the two agree is what the
parity tests find out. `model_type` is the key, as in config.json.
"""

from __future__ import annotations

from typing import Any, Final

# (module below the decoder layer, whether the site is its input or its output)
Place = tuple[str, str]

_WITH_PRE_NORMS: Final[dict[str, Place]] = {
    "resid_pre": ("", "in"),
    "resid_mid": ("post_attention_layernorm", "in"),
    "resid_post": ("", "out"),
    "attn_out": ("self_attn", "out"),
    "mlp_out": ("mlp", "out"),
    "z": ("self_attn.o_proj", "in"),
}

PLACES: Final[dict[str, tuple[str, dict[str, Place]]]] = {
    "llama": ("model.layers", _WITH_PRE_NORMS),
    "mistral": ("model.layers", _WITH_PRE_NORMS),
    "qwen2": ("model.layers", _WITH_PRE_NORMS),
    "qwen3": ("model.layers", _WITH_PRE_NORMS),
    "mixtral": ("model.layers", _WITH_PRE_NORMS),
    "qwen3_moe": ("model.layers", _WITH_PRE_NORMS),
    "phi3": ("model.layers", _WITH_PRE_NORMS),
    "gemma3_text": (
        "model.layers",
        {
            "resid_pre": ("", "in"),
            "resid_mid": ("pre_feedforward_layernorm", "in"),
            "resid_post": ("", "out"),
            "attn_out": ("post_attention_layernorm", "out"),
            "mlp_out": ("post_feedforward_layernorm", "out"),
            "z": ("self_attn.o_proj", "in"),
        },
    ),
    "olmo2": (
        "model.layers",
        {
            "resid_pre": ("", "in"),
            "resid_mid": ("mlp", "in"),
            "resid_post": ("", "out"),
            "attn_out": ("post_attention_layernorm", "out"),
            "mlp_out": ("post_feedforward_layernorm", "out"),
            "z": ("self_attn.o_proj", "in"),
        },
    ),
    "gpt2": (
        "transformer.h",
        {
            "resid_pre": ("", "in"),
            "resid_mid": ("ln_2", "in"),
            "resid_post": ("", "out"),
            "attn_out": ("attn", "out"),
            "mlp_out": ("mlp", "out"),
            "z": ("attn.c_proj", "in"),
        },
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        {
            "resid_pre": ("", "in"),
            "resid_mid": ("post_attention_layernorm", "in"),
            "resid_post": ("", "out"),
            "attn_out": ("attention", "out"),
            "mlp_out": ("mlp", "out"),
            "z": ("attention.dense", "in"),
        },
    ),
}


def layers_of(model: Any) -> list[Any]:
    """Return the decoder layers of a model."""
    path, _ = PLACES[model.config.model_type]
    return list(model.get_submodule(path))


def places_of(model: Any) -> dict[str, Place]:
    """Return the sites that each layer of a model has."""
    _, places = PLACES[model.config.model_type]
    if getattr(model.config, "use_parallel_residual", False):
        # Attention and MLP start from the same stream; nothing lies between them.
        return {site: place for site, place in places.items() if site != "resid_mid"}
    return places
