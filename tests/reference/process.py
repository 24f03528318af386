"""The reference in a process of its own.

vLLM's transformers backend changes classes of transformers in the process that it runs in; a
reference beside it would no longer be plain. Only plain data crosses.
"""

from __future__ import annotations

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reference import hooked
from tests.reference.ops import reduced
from tests.reference.sites import layers_of, places_of

_LOST = 1e-30  # below this a row counts as zero


def start() -> ProcessPoolExecutor:
    """Start the process; shut it down as any executor."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@functools.lru_cache(maxsize=4)
def _model(folder: Path) -> Any:
    torch.set_num_threads(1)
    return hooked.load(folder)


def run_all(folder: Path, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run requests, each {"token_ids", "edits", "reads"}, on the model in `folder`.

    Each gives {"reads": {name: {layer: {"rows", "sizes"}}}, "logits"}; `sizes` are what errors
    of the rows are measured against.
    """
    return [_run(_model(folder), one) for one in asked]


def passed(folder: Path, token_ids: list[int], edits: list[dict[str, Any]]) -> hooked.Passed:
    """Run one sequence on the model in `folder` and return all that was read."""
    return hooked.forward(_model(folder), token_ids, edits)


def facts(folder: Path, token_ids: list[int]) -> dict[str, Any]:
    """Return what transformers itself tells of a pass: "hidden" [layers + 1], and z's weights.

    "z_weights" has for each layer (matrix, bias) with which z becomes what attention gives.
    """
    model = _model(folder)
    with torch.no_grad():
        output = model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    return {
        "hidden": [rows[0].numpy() for rows in output.hidden_states],
        "z_weights": [_z_weights(layer, model) for layer in layers_of(model)],
    }


def _z_weights(layer: Any, model: Any) -> tuple[np.ndarray, np.ndarray]:
    path, _ = places_of(model)["z"]
    module = layer.get_submodule(path)
    weight = module.weight.detach().numpy()
    # GPT-2 keeps its matrices the other way round.
    matrix = weight if type(module).__name__ == "Conv1D" else weight.T
    bias = getattr(module, "bias", None)
    return matrix, np.zeros(matrix.shape[1]) if bias is None else bias.detach().numpy()


def _run(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    passed = hooked.forward(model, asked["token_ids"], asked["edits"])
    reads: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for read in asked["reads"]:
        source = passed.before if read["before"] else passed.after
        reads[read["name"]] = {}
        for layer in read["layers"]:
            rows = source[read["site"], layer][read["positions"]]
            reads[read["name"]][layer] = {
                "rows": reduced(rows, read),
                "sizes": _sizes(rows, read),
            }
    return {"reads": reads, "logits": passed.logits}


def _sizes(rows: np.ndarray, read: dict[str, Any]) -> np.ndarray:
    """Return [rows or 1]: the norm of a row, of the mean's rows, or of row times directions."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    if read["reduce"] == "mean":
        norms = norms.mean(keepdims=True) if len(norms) else norms
    if read["reduce"] == "project":
        lengths = np.linalg.norm(np.asarray(read["directions"], dtype=np.float64), axis=1)
        norms = norms * (1.0 if read["unit"] else float(np.linalg.norm(lengths)))
    return np.maximum(norms, _LOST)
