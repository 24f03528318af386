"""A plain Hugging Face forward pass with every site of every layer read and written by hooks.

Imports nothing of the product and takes plain data. One sequence at a time, no cache, no batch:
whatever a batch does, a request must come out as it does here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.reference.ops import steer
from tests.reference.sites import layers_of, places_of


@dataclass(frozen=True)
class Passed:
    """One pass: rows [tokens, width] before and after the edits of (site, layer), and logits."""

    before: dict[tuple[str, int], np.ndarray]
    after: dict[tuple[str, int], np.ndarray]
    logits: np.ndarray


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def forward(model: Any, token_ids: list[int], edits: list[dict[str, Any]]) -> Passed:
    """Run one sequence with edits: those of `ops.steer`, each with its "site" and "layer".

    Hidden states are changed in place, so that whatever else holds them (a residual that was set
    aside before a norm) goes on with the same numbers. They are rounded once to the model's dtype.
    """
    passed = Passed({}, {}, np.zeros(0))
    places = places_of(model)
    unknown = [edit["site"] for edit in edits if edit["site"] not in places]
    assert not unknown, f"this model has no {unknown}"

    def visit(site: str, layer: int, tensor: torch.Tensor) -> None:
        here = [edit for edit in edits if (edit["site"], edit["layer"]) == (site, layer)]
        before = tensor[0].detach().clone()
        passed.before[site, layer] = before.float().numpy()
        if here:
            after = torch.from_numpy(steer(before.double().numpy(), here)).to(tensor.dtype)
            # A row without a steer keeps its bits.
            moved = (after != before).any(dim=1)
            tensor[0, moved] = after[moved]
        passed.after[site, layer] = tensor[0].detach().float().numpy().copy()

    handles = []
    for number, layer in enumerate(layers_of(model)):
        # Hooks of one module run in the order of their making: the input comes before the output.
        for site, (path, side) in places.items():
            module = layer.get_submodule(path)
            handles.append(_hook(module, side, site=site, layer=number, visit=visit))
    try:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return Passed(passed.before, passed.after, logits.float().numpy())


def _hook(module: Any, side: str, *, site: str, layer: int, visit: Any) -> Any:
    def before(_module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        visit(site, layer, args[0] if args else named["hidden_states"])

    def after(_module: Any, _args: Any, output: Any) -> None:
        visit(site, layer, output[0] if isinstance(output, tuple) else output)

    if side == "in":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)
