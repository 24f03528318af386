"""What a request came to: exactly one outcome each, as frozen data.

Capture rows stay in a memory-mapped file (`CaptureRows`) until the part writer has copied them
into Parquet; whoever consumes an outcome calls `release()` once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.completions.spec import RequestSpec
from app.steering.spec import Reduce, Site


@dataclass(frozen=True, slots=True)
class Work:
    """A request of a leased shard: what to run, and the name of its place in the Job."""

    request_index: int
    custom_id: str | None
    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One alternative at one token: its id, its text, its natural-log probability."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a request. `token_ids` counts a cut stop string's and the end token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | None = None
    token_logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class CaptureRows:
    """What a capture read: `layers[L]` is [rows, width], one row for each of `positions`.

    `positions` [rows] ascends within 0..P + G - 2; those that the capture asked for and that ran.
    With Reduce.none the rows are the model's: bfloat16 as uint16 bit patterns (`dtype` =
    "bfloat16"), or float32. Reduced rows are float32: width 1 for norm, one number a direction
    for project. Reduce.mean gives one row for all of `positions`, none when there are none.
    `path` is the file behind the arrays.
    """

    name: str
    dtype: str
    layers: Mapping[int, npt.NDArray[np.uint16] | npt.NDArray[np.float32]]
    positions: npt.NDArray[np.int32]
    reduce: Reduce = Reduce.none
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The request ran to its end; everything it asked for is here."""

    choices: tuple[Choice, ...]
    captures: tuple[CaptureRows, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    started_at: float = 0.0
    finished_at: float = 0.0
    steered_rows: Mapping[tuple[Site, int], int] = field(default_factory=dict)

    @property
    def completion_tokens(self) -> int:
        """Sum of G over the choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def release(self) -> None:
        """Delete the files behind the captures (mapped arrays stay readable until dropped)."""
        for capture in self.captures:
            if capture.path is not None:
                capture.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Errored:
    """The request itself failed in the engine; its neighbours did not."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The request was aborted before its end because its Job was cancelled or expired."""


Outcome = Succeeded | Errored | Cancelled
