"""Requests with captures of every kind, as an engine hands them over, from known numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Direction, Intervention, Reduce, Site, Spans
from tests.results.samples import HIDDEN, bf16_rows
from worker.outcomes import CaptureRows, Choice, Succeeded, Work

PROMPT, GENERATED = 6, 4
RAN = PROMPT + GENERATED - 1
NAME = "sv_" + "1" * 64

RawRows = npt.NDArray[np.uint16] | npt.NDArray[np.float32]


def a_capture(
    name: str = "probe", reduce: Reduce = Reduce.none, *, directions: int = 3, **fields: object
) -> Capture:
    """Describe a capture of resid_post at layer 1, of all positions, unless told otherwise."""
    project = reduce is Reduce.project
    asked: dict[str, object] = {
        "name": name,
        "site": Site.resid_post,
        "layers": (1,),
        "reduce": reduce,
        "directions": tuple(Direction(NAME, row) for row in range(directions)) if project else (),
        "unit": project,
        **fields,
    }
    return Capture(**asked)  # type: ignore[arg-type]


def positions_of(spans: Spans | None, ran: int = RAN) -> list[int]:
    """List what spans read of 0..ran - 1, one by one."""
    return [
        position
        for position in range(ran)
        if spans is None or any(start <= position < end for start, end in spans)
    ]


@dataclass(frozen=True)
class Read:
    """A request whose captures were read, and the float32 bits that each file must give back."""

    work: Work
    outcome: Succeeded
    wanted: Mapping[tuple[str, int], npt.NDArray[np.uint32]]


def a_read(
    index: int,
    captures: Sequence[Capture],
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    prompt: int = PROMPT,
    generated: int = GENERATED,
    interventions: tuple[Intervention, ...] = (),
    folder: Path | None = None,
) -> Read:
    """Make a request with random values; with `folder` its rows lie in mapped files."""
    spec = RequestSpec(
        prompt_token_ids=tuple(range(10, 10 + prompt)),
        prompt=None,
        sampling=Sampling(max_tokens=generated, seed=5),
        interventions=interventions,
        captures=tuple(captures),
    )
    wanted, rows = {}, []
    for number, capture in enumerate(captures):
        places = np.array(positions_of(capture.spans, prompt + generated - 1), dtype=np.int32)
        layers = {}
        for layer in capture.layers:
            values = _values([seed, index, number, layer], capture, len(places), dtype)
            layers[layer] = values
            wanted[capture.name, layer] = as_float32_bits(values)
        path = None
        if folder is not None and len(places):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{index}-{number}"
            layers = _mapped(layers, path)
        rows.append(CaptureRows(capture.name, dtype, layers, places, capture.reduce, path))
    choice = Choice(0, f"text {index}", tuple(range(50, 50 + generated)), "length")
    outcome = Succeeded((choice,), tuple(rows), started_at=1.5, finished_at=2.5)
    return Read(Work(index, f"c-{index}", spec), outcome, wanted)


def as_float32_bits(values: RawRows) -> npt.NDArray[np.uint32]:
    """Give the bits that a reader of a file must find."""
    if values.dtype == np.uint16:
        return values.astype(np.uint32) << 16
    return values.view(np.uint32)


def _values(seed: Sequence[int], capture: Capture, positions: int, dtype: str) -> RawRows:
    rows = min(positions, 1) if capture.reduce is Reduce.mean else positions
    width = capture.width(HIDDEN)
    if capture.reduce is Reduce.none and dtype == "bfloat16":
        number = int(np.random.default_rng(seed).integers(2**31))
        return bf16_rows(number, rows, width) if rows else np.empty((0, width), dtype=np.uint16)
    bits = np.random.default_rng(seed).integers(0, 2**32, (rows, width), dtype=np.uint32)
    infinite = (bits & 0x7F800000) == 0x7F800000
    bits[infinite] &= 0xBFFFFFFF  # finite, as the engine promises
    return bits.view(np.float32)


def _mapped(layers: Mapping[int, RawRows], path: Path) -> dict[int, RawRows]:
    some = next(iter(layers.values()))
    mapped = np.memmap(path, some.dtype, "w+", shape=(len(layers), *some.shape))
    mapped[:] = np.stack(list(layers.values()))
    mapped.flush()
    return dict(zip(layers, mapped, strict=True))
