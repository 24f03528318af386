"""Which models can be steered, and where in a decoder layer of each the sites are.

The one table of its kind: the API reads which sites a model has, the engine where to tap them.
An architecture or a site that is not here is refused by name. Nothing is guessed: a wrong guess
would read and write some other tensor without an error.

Paths are those of vLLM's modules, below a decoder layer. A pair is (hidden, residual) whose sum
is the stream, as fused layers pass it on; everything else is a single tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from app.steering.spec import Site


@dataclass(frozen=True, slots=True)
class Tap:
    """Where a site is: what goes into a module of the layer, or what comes out of it.

    `module` is the dotted path below the layer, "" for the layer itself. `pair` tells that two
    tensors, hidden and residual, stand for the stream there.
    """

    module: str
    side: Literal["input", "output"]
    pair: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """`layers` is the dotted path of the decoder layers; `taps` the sites of each of them."""

    layers: str
    taps: Mapping[Site, Tap]
    without: Mapping[str, tuple[Site, ...]] = field(default_factory=dict)

    def sites(self, config: Mapping[str, Any]) -> tuple[Site, ...]:
        """List the sites that a model with this config.json has.

        `without` names sites that are missing when a key of the config is true.
        """
        missing = {
            site for key, sites in self.without.items() if config.get(key, True) for site in sites
        }
        return tuple(site for site in self.taps if site not in missing)


def _taps(*, pre: Tap, mid: Tap, post: Tap, attn_out: Tap, mlp_out: Tap, z: Tap) -> dict[Site, Tap]:
    return {
        Site.resid_pre: pre,
        Site.resid_mid: mid,
        Site.resid_post: post,
        Site.attn_out: attn_out,
        Site.mlp_out: mlp_out,
        Site.z: z,
    }


def _fused(mlp: str = "mlp") -> Architecture:
    """Llama and its kin: norms before attention and MLP, each fused with the addition."""
    return Architecture(
        "model.layers",
        _taps(
            pre=Tap("", "input", pair=True),
            mid=Tap("post_attention_layernorm", "input", pair=True),
            post=Tap("", "output", pair=True),
            attn_out=Tap("self_attn", "output"),
            mlp_out=Tap(mlp, "output"),
            z=Tap("self_attn.o_proj", "input"),
        ),
    )


_GEMMA3 = Architecture(
    "model.layers",
    _taps(
        pre=Tap("", "input", pair=True),
        mid=Tap("pre_feedforward_layernorm", "input", pair=True),
        post=Tap("", "output", pair=True),
        # What is added to the stream has gone through the post-norm.
        attn_out=Tap("post_attention_layernorm", "output"),
        mlp_out=Tap("post_feedforward_layernorm", "output"),
        z=Tap("self_attn.o_proj", "input"),
    ),
)

_OLMO2 = Architecture(
    "model.layers",
    _taps(
        pre=Tap("", "input"),
        mid=Tap("mlp", "input"),  # no norm before the MLP
        post=Tap("", "output"),
        attn_out=Tap("post_attention_layernorm", "output"),
        mlp_out=Tap("post_feedforward_layernorm", "output"),
        z=Tap("self_attn.o_proj", "input"),
    ),
)

_GPT2 = Architecture(
    "transformer.h",
    _taps(
        pre=Tap("", "input"),
        mid=Tap("ln_2", "input"),
        post=Tap("", "output"),
        attn_out=Tap("attn", "output"),
        mlp_out=Tap("mlp", "output"),
        z=Tap("attn.c_proj", "input"),
    ),
)

_GPT_NEOX = Architecture(
    "model.layers",
    _taps(
        pre=Tap("", "input"),
        mid=Tap("post_attention_layernorm", "input"),
        post=Tap("", "output"),
        attn_out=Tap("attention", "output"),
        mlp_out=Tap("mlp", "output"),
        z=Tap("attention.dense", "input"),
    ),
    # Attention and MLP read the same stream side by side: there is nothing in the middle.
    without={"use_parallel_residual": (Site.resid_mid,)},
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": _fused(),
    "MistralForCausalLM": _fused(),
    "Qwen2ForCausalLM": _fused(),
    "Qwen3ForCausalLM": _fused(),
    "Phi3ForCausalLM": _fused(),
    "Qwen3MoeForCausalLM": _fused(),
    "MixtralForCausalLM": _fused("block_sparse_moe"),
    "Gemma3ForCausalLM": _GEMMA3,
    "Olmo2ForCausalLM": _OLMO2,
    "GPT2LMHeadModel": _GPT2,
    "GPTNeoXForCausalLM": _GPT_NEOX,
}
