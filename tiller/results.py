"""Reads captured activations of a downloaded Job: numbers as one array, their places beside.

    folder = client.download(job["id"], f"results/{job['id']}")
    rows = read_capture(folder, layer=22)                     # output_residual_stream
    rows = read_capture(folder, layer=22, name="my_probe")    # a named capture
    rows.values[row]  belongs to  rows.places.slice(row, 1)

Only files of that capture and layer are opened. Any Parquet reader can do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from tiller.errors import TillerError

RESIDUAL_STREAM = "residual_stream"
_LAYER = "layer="


class NoSuchCaptureError(TillerError):
    """The folder has no files of this capture and layer; the message lists what it has."""


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """What a capture read at one layer, ordered by request_index and position.

    `values` is float32, [rows, width], or [rows] for norms. `places` has the other columns:
    request_index, custom_id, and position, token_id, is_generated, steered (of a mean: positions,
    the number of positions that it was taken over).
    """

    places: pa.Table
    values: npt.NDArray[np.float32]


def list_captures(folder: str | Path) -> dict[str, list[int]]:
    """List the captures of a downloaded Job with their layers, ascending."""
    root = Path(folder)
    homes = {RESIDUAL_STREAM: root / "activations"}
    homes |= {home.name: home for home in sorted((root / "captures").glob("*"))}
    found = {name: _layers(home) for name, home in homes.items()}
    return {name: layers for name, layers in found.items() if layers}


def read_capture(
    folder: str | Path,
    layer: int,
    *,
    name: str = RESIDUAL_STREAM,
    request_indices: Sequence[int] | None = None,
) -> CapturedRows:
    """Read a capture at one layer, of all requests or of those in `request_indices`.

    Raises NoSuchCaptureError when the folder has none.
    """
    root = Path(folder)
    home = root / "activations" if name == RESIDUAL_STREAM else root / "captures" / name
    files = sorted((home / f"{_LAYER}{layer}").glob("*.parquet"))
    if not files:
        known = ", ".join(f"{key} at {layers}" for key, layers in list_captures(root).items())
        msg = f"{root} has no capture {name!r} at Layer {layer}; it has {known or 'none'}."
        raise NoSuchCaptureError(msg)
    data = ds.dataset([str(path) for path in files])
    wanted = None if request_indices is None else ds.field("request_index").isin(request_indices)
    table = data.to_table(filter=wanted)
    column = table.column(table.num_columns - 1).combine_chunks()
    width = None
    if pa.types.is_fixed_size_list(column.type):
        width, column = column.type.list_size, column.flatten()
    values = column.to_numpy(zero_copy_only=False)
    places = table.select(table.column_names[:-1])
    return CapturedRows(places, values if width is None else values.reshape(-1, width))


def _layers(home: Path) -> list[int]:
    names = (path.name.removeprefix(_LAYER) for path in home.glob(f"{_LAYER}*"))
    return sorted(int(name) for name in names if name.isdecimal())
