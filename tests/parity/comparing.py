"""Compare what the engine gave with what the reference gives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.asked import Asked, to_reference
from tests.reference import process
from worker.outcomes import Outcome, Succeeded

TOLERANCE = 1e-5
# Two tokens whose logits are this close (against their spread) may change places.
TIE = 1e-5


@dataclass(frozen=True)
class Compared:
    """The largest relative error of a captured row, and how far a token is from the greedy one.

    That is the distance of their logits against the spread of all, 0 for the greedy token itself.
    """

    error: float
    behind: float

    def within(self, tolerance: float) -> bool:
        """Say whether the rows are within a tolerance and the tokens are the greedy ones."""
        return self.error <= tolerance and self.behind <= TIE

    @property
    def equal(self) -> bool:
        return self.within(TOLERANCE)


class Reference:
    """The reference process with the model in `folder`."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self._pool = pool
        self._folder = folder

    def compare(self, asked: Sequence[Asked], outcomes: Sequence[Outcome]) -> list[Compared]:
        """Compare outcomes with the reference, in order."""
        wanted = []
        for one, outcome in zip(asked, outcomes, strict=True):
            assert isinstance(outcome, Succeeded), (outcome, one)
            tokens = list(outcome.choices[0].token_ids)
            assert len(tokens) == one.tokens
            wanted.append({"token_ids": [*one.prompt, *tokens[:-1]], **to_reference(one)})
        results = self._pool.submit(process.run_all, self._folder, wanted).result()
        return [
            _compared(one, outcome, want, result)
            for one, outcome, want, result in zip(asked, outcomes, wanted, results, strict=True)
        ]


def assert_equal(
    names: Sequence[object],
    asked: Sequence[Asked],
    compared: Sequence[Compared],
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that every outcome equals the reference; name all that do not."""
    wrong = [
        f"{name}: error {result.error:.2e}, tokens off by {result.behind:.2e}: {_shown(one)}"
        for name, one, result in zip(names, asked, compared, strict=True)
        if not result.within(tolerance)
    ]
    assert not wrong, f"{len(wrong)} of {len(names)} differ:\n" + "\n".join(wrong)


def _compared(
    asked: Asked, outcome: Outcome, want: dict[str, Any], result: dict[str, Any]
) -> Compared:
    assert isinstance(outcome, Succeeded)
    logits = result["logits"][len(asked.prompt) - 1 :]
    tokens = np.array(outcome.choices[0].token_ids)
    behind = logits.max(axis=1) - np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    spread = np.maximum(np.ptp(logits, axis=1), 1e-30)  # a row of zeros makes logits of zeros
    behind = float((behind / spread).max())
    error = 0.0
    assert [capture.name for capture in outcome.captures] == [read.name for read in asked.reads]
    for capture, read in zip(outcome.captures, want["reads"], strict=True):
        assert capture.positions.tolist() == read["positions"], (read, asked)
        assert tuple(capture.layers) == read["layers"]
        for layer, rows in capture.layers.items():
            expected = result["reads"][read["name"]][layer]
            assert rows.shape == expected["rows"].shape, (read, asked)
            off = np.linalg.norm(rows - expected["rows"], axis=1) / expected["sizes"]
            error = max(error, float(off.max(initial=0.0)))
    return Compared(error, behind)


def _shown(asked: Asked) -> str:
    edits = [
        f"{edit.op}{edit.own} {edit.site} L{edit.layer} {edit.at}"
        f"{' heads ' + str(edit.heads) if edit.heads else ''}{' summed' if edit.summed else ''}"
        for edit in asked.edits
    ]
    reads = [
        f"{read.name}: {read.site} L{list(read.layers)} {read.at} {read.reduce}"
        f"{' before' if read.before else ''}"
        for read in asked.reads
    ]
    return f"P={len(asked.prompt)} M={asked.tokens} {edits} reads {reads}"
