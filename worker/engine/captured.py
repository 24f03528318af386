"""Regions of a request's captures: made before it runs, read and checked after its last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.steering.spec import Capture, Reduce
from worker.outcomes import CaptureRows, Errored
from worker.steering.carrier import Read
from worker.steering.reads import widened
from worker.steering.region import CaptureRegion, region_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from app.completions.spec import RequestSpec
    from app.steering.spec import Site

    Stored = npt.NDArray[np.uint16] | npt.NDArray[np.float32]

NON_FINITE = (
    "non_finite_activations",
    "Activations became infinite or not a number. Lower the scale of the interventions.",
)


def make_regions(
    spec: RequestSpec, prefix: Path, widths: Mapping[Site, int], dtype: str
) -> list[tuple[Capture, CaptureRegion]]:
    """Make one region a capture, with room for every position that may run.

    Raises OSError when the disk is full; nothing is left then.
    """
    regions: list[tuple[Capture, CaptureRegion]] = []
    # One more than the rows of the result: an engine may run the last sampled token, too.
    positions = spec.prompt_tokens + spec.sampling.max_tokens
    try:
        for number, capture in enumerate(spec.captures):
            rows = max(capture.rows(positions), 1)
            shape = region_shape(capture, rows, widths[capture.site], dtype)
            path = prefix.with_name(f"{prefix.name}.{number}")
            regions.append((capture, CaptureRegion.create(path, shape)))
    except OSError:
        drop_regions(regions)
        raise
    return regions


def drop_regions(regions: Sequence[tuple[Capture, CaptureRegion]]) -> None:
    """Delete the files of regions."""
    for _, region in regions:
        region.path.unlink(missing_ok=True)


def reads_of(regions: Sequence[tuple[Capture, CaptureRegion]]) -> tuple[Read, ...]:
    """Say what the engine is to read, and where to."""
    return tuple(Read(capture, str(region.path), region.shape.rows) for capture, region in regions)


def needs_prompt(spec: RequestSpec) -> bool:
    """Whether a capture wants a position that a prefix cache could leave out.

    The last position of a prompt always runs.
    """
    return any(
        capture.spans is None or any(start < spec.prompt_tokens - 1 for start, _ in capture.spans)
        for capture in spec.captures
    )


def read_regions(
    regions: Sequence[tuple[Capture, CaptureRegion]], ran: int, dtype: str
) -> tuple[CaptureRows, ...] | Errored:
    """Read what was captured at positions 0..ran - 1; each must be there and finite."""
    found = []
    for capture, region in regions:
        rows = capture.rows(ran)
        if not region.complete(rows):
            have = int(region.written[:, :rows].min(axis=0).sum())
            return Errored(
                "activation_rows_mismatch",
                f"{have} of {rows} rows of the capture {capture.name} were captured.",
            )
        if not region.finite(rows):
            return Errored(*NON_FINITE)
        found.append(_rows(capture, region, rows, ran, dtype))
    return tuple(found)


def _rows(capture: Capture, region: CaptureRegion, rows: int, ran: int, dtype: str) -> CaptureRows:
    layers: dict[int, Stored] = {
        layer: region.data[place, :rows] for place, layer in enumerate(capture.layers)
    }
    if capture.reduce is Reduce.mean:
        layers = {layer: _mean(values, dtype) for layer, values in layers.items()}
    return CaptureRows(
        name=capture.name,
        dtype=dtype if capture.reduce is Reduce.none else "float32",
        layers=layers,
        positions=_positions(capture, ran),
        reduce=capture.reduce,
        path=region.path,
    )


def _mean(rows: Stored, dtype: str) -> npt.NDArray[np.float32]:
    """Average rows in float64, [1, width]; none when there are none."""
    if not len(rows):
        return np.zeros((0, rows.shape[1]), dtype=np.float32)
    values = widened(rows, dtype)
    mean: npt.NDArray[np.float32] = values.mean(axis=0, keepdims=True).astype(np.float32)
    return mean


def _positions(capture: Capture, ran: int) -> npt.NDArray[np.int32]:
    spans = ((0, ran),) if capture.spans is None else capture.spans
    parts = [np.arange(start, min(end, ran), dtype=np.int32) for start, end in spans]
    return np.concatenate([np.zeros(0, dtype=np.int32), *parts])
