"""The heat map of a patching study by plain Hugging Face; imports nothing of the product.

Each cell is a pass of its own: the corrupted prompt, with the row that the clean prompt has after
a layer at a position put in its place.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.reference import process
from tests.reference.hooked import Passed

FIRST_WORD = 3  # the ids below are <s>, </s> and <unk>


@dataclass(frozen=True)
class Reference:
    """Log-probabilities [vocab] of the next token: both runs', and [layers, positions, vocab]."""

    clean: np.ndarray
    corrupted: np.ndarray
    patched: np.ndarray

    def answers(self) -> tuple[int, int]:
        """Return the likeliest word after the clean prompt and after the corrupted one."""
        right, wrong = (
            int(run[FIRST_WORD:].argmax()) + FIRST_WORD for run in (self.clean, self.corrupted)
        )
        return right, wrong


def heat_map(
    pool: ProcessPoolExecutor, folder: Path, clean: list[int], corrupted: list[int]
) -> Reference:
    """Run the whole study on the model in `folder`, one pass after the other."""

    def passed(token_ids: list[int], edits: list[dict[str, object]]) -> Passed:
        return pool.submit(process.passed, folder, token_ids, edits).result()

    source = passed(clean, [])
    layers = sorted(layer for site, layer in source.after if site == "resid_post")
    patched = [
        [passed(corrupted, [_patch(source, layer, position)]) for position in range(len(corrupted))]
        for layer in layers
    ]
    return Reference(
        clean=_next_word(source),
        corrupted=_next_word(passed(corrupted, [])),
        patched=np.array([[_next_word(cell) for cell in cells] for cells in patched]),
    )


def _patch(source: Passed, layer: int, position: int) -> dict[str, object]:
    row = source.after["resid_post", layer][position]
    return {
        "op": "replace",
        "site": "resid_post",
        "layer": layer,
        "steers": [(position, row.astype(np.float64))],
    }


def _next_word(run: Passed) -> np.ndarray:
    logits = run.logits[-1].astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
