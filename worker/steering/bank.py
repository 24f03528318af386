"""The vector bank: rows of steering vectors on the device, shared and reference-counted.

A block is a run of rows of one stored vector, as they are or scaled to unit length (norms in
float64). Blocks are loaded once, kept while any request uses them, and for a while after, until
room is needed. Scales live in the ops: requests with different strengths share a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_FIRST_ROWS = 256


class BlockKey(NamedTuple):
    """Rows [row, row + rows) of a stored vector, at unit length or not.

    Of vectors that are `whole` numbers wide, `width` numbers from `column` on.
    """

    vector: str
    row: int
    rows: int
    unit: bool
    whole: int
    column: int
    width: int


@dataclass(slots=True)
class Block:
    """Where the rows of a block lie; `peaks` is the largest magnitude in each, float64 [count]."""

    places: npt.NDArray[np.int64]
    peaks: npt.NDArray[np.float64]
    users: int = 0


class UnknownVectorError(Exception):
    """The vector that a request names is not in the vector folder."""


class BankFullError(Exception):
    """The vectors of the running requests do not fit into the bank."""


class VectorBank:
    """A table of float32 rows [capacity, width], growing up to `rows_max`.

    Every key that it is asked for has this width.
    """

    def __init__(
        self,
        width: int,
        rows_max: int,
        load: Callable[[str], npt.NDArray[np.float32]],
        device: torch.device,
    ) -> None:
        """`load` returns a stored vector as [rows, width] or raises UnknownVectorError."""
        self._load = load
        self._rows_max = rows_max
        self._blocks: dict[BlockKey, Block] = {}
        first = min(_FIRST_ROWS, rows_max)
        self._free = list(range(first - 1, -1, -1))
        self.table = torch.zeros((first, width), dtype=torch.float32, device=device)

    @property
    def blocks(self) -> int:
        """How many blocks the bank holds, in use or not."""
        return len(self._blocks)

    def acquire(self, key: BlockKey) -> Block:
        """Return the block, loaded if need be, with one more user.

        Raises UnknownVectorError, BankFullError, or ValueError when the stored vector does not
        have these rows, has another width, or holds a number that is not finite.
        """
        block = self._blocks.get(key)
        if block is None:
            block = self._put(key)
        # Moved to the end: eviction takes the least recently used first.
        self._blocks.pop(key, None)
        self._blocks[key] = block
        block.users += 1
        return block

    def release(self, key: BlockKey) -> None:
        """Take back one use of a block."""
        self._blocks[key].users -= 1

    def _put(self, key: BlockKey) -> Block:
        stored = self._load(key.vector)
        taken = stored[key.row : key.row + key.rows]
        if key.row < 0 or taken.shape != (key.rows, key.whole):
            msg = (
                f"rows {key.row} to {key.row + key.rows - 1} of width {key.whole} are not in "
                f"vector {key.vector} of shape {tuple(stored.shape)}"
            )
            raise ValueError(msg)
        rows = np.array(taken[:, key.column : key.column + key.width], dtype=np.float32)
        if not np.isfinite(rows).all():
            msg = f"vector {key.vector} holds a number that is not finite"
            raise ValueError(msg)
        peaks = np.abs(rows).max(axis=1).astype(np.float64)
        if key.unit:
            norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
            rows = (rows / np.where(norms > 0, norms, 1.0)).astype(np.float32)
        places = self._take_places(key.rows)
        self.table[torch.from_numpy(places)] = torch.from_numpy(rows).to(self.table.device)
        return Block(places=places, peaks=peaks)

    def _take_places(self, count: int) -> npt.NDArray[np.int64]:
        if len(self._free) < count:
            self._grow(count)
        if len(self._free) < count:
            self._evict(count)
        if len(self._free) < count:
            msg = f"no room for {count} more rows of {self._rows_max}"
            raise BankFullError(msg)
        taken = self._free[-count:]
        del self._free[-count:]
        return np.array(taken, dtype=np.int64)

    def _grow(self, count: int) -> None:
        have = self.table.shape[0]
        want = min(max(have * 2, have + count), self._rows_max)
        if want <= have:
            return
        table = self.table.new_zeros((want, self.table.shape[1]))
        table[:have] = self.table
        self.table = table
        self._free.extend(range(want - 1, have - 1, -1))

    def _evict(self, count: int) -> None:
        for key in [key for key, block in self._blocks.items() if block.users == 0]:
            if len(self._free) >= count:
                return
            self._free.extend(self._blocks.pop(key).places.tolist())


class Banks:
    """One bank a width: whole rows of the sites, and slices for single heads."""

    def __init__(
        self,
        load: Callable[[str], npt.NDArray[np.float32]],
        device: torch.device,
        bytes_max: int,
    ) -> None:
        """`load` as in VectorBank; each bank grows up to `bytes_max`."""
        self._load = load
        self._device = device
        self._bytes_max = bytes_max
        self._banks: dict[int, VectorBank] = {}

    def acquire(self, key: BlockKey) -> Block:
        """Return a block of the bank of its width; see VectorBank.acquire."""
        bank = self._banks.get(key.width)
        if bank is None:
            rows_max = max(self._bytes_max // (4 * key.width), 1)
            bank = VectorBank(key.width, rows_max, self._load, self._device)
            self._banks[key.width] = bank
        return bank.acquire(key)

    def release(self, key: BlockKey) -> None:
        """Take back one use of a block."""
        self._banks[key.width].release(key)

    def table(self, width: int) -> torch.Tensor:
        """Return the rows of one width, float32 [capacity, width]; it moves when the bank grows."""
        return self._banks[width].table
