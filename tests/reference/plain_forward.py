"""What steering means, written down a second time: a plain Hugging Face forward with hooks.

Imports nothing of the product. Takes token ids and plain dictionaries, runs one request at a time
in float32, without a cache, and gives the stream after each layer and the next token everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def load(folder: Path) -> Any:
    """Load a causal language model in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def forward(
    model: Any, token_ids: list[int], edits: list[dict[str, Any]]
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Run one sequence with edits; return the stream [tokens, width] by layer and logits.

    An edit is {"layer", "rows" [n, width], "scale", "norm_match", "positions" | "spans" | none}:
    with positions, position k takes row k; otherwise row 0 goes to the spans, or everywhere.
    """
    streams: dict[int, np.ndarray] = {}

    def hook_for(layer: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> Any:
            stream = output[0] if isinstance(output, tuple) else output
            edited = _edit(stream[0], [edit for edit in edits if edit["layer"] == layer])
            streams[layer] = edited.detach().clone().numpy()
            batch = edited.unsqueeze(0)
            return (batch, *output[1:]) if isinstance(output, tuple) else batch

        return hook

    handles = [
        layer.register_forward_hook(hook_for(number))
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return streams, logits.numpy()


def _edit(stream: torch.Tensor, edits: list[dict[str, Any]]) -> torch.Tensor:
    before = stream.float()
    after = before.clone()
    for edit in edits:
        rows = np.atleast_2d(np.asarray(edit["rows"], dtype=np.float64))
        for position, row in _places(edit, len(before)):
            vector = rows[row]
            if edit.get("norm_match"):
                length = float(np.linalg.norm(vector))
                if length == 0:
                    continue
                norm = float(torch.linalg.vector_norm(before[position].double()))
                vector = vector / length * norm
            after[position] += torch.tensor(edit["scale"] * vector, dtype=torch.float32)
    return after.to(stream.dtype)


def _places(edit: dict[str, Any], length: int) -> list[tuple[int, int]]:
    if edit.get("positions") is not None:
        return [(at, row) for row, at in enumerate(edit["positions"]) if at < length]
    if edit.get("spans") is not None:
        return [(at, 0) for begin, end in edit["spans"] for at in range(begin, min(end, length))]
    return [(at, 0) for at in range(length)]
