"""Reads vectors in any of the forms in which they are sent, and interns the numbers they bring.

    "sv_…" of a stored vector | nested lists of numbers | an encoded object

Measuring comes first and spends no memory; rules look at the shape, then the numbers are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from app.completions import tensors
from app.completions.problems import RefusedError, is_int, is_number, shown
from app.completions.tensors import Measured
from app.steering.vectors import Vector

FORMS: Final = 'the name of a stored vector ("sv_…"), numbers, or an encoded object'
_KINDS: Final = ("dtype", "original_dtype", "compression")


@dataclass(frozen=True, slots=True)
class SentVector:
    """A vector of a known shape: [width], [rows, width] or [rows, positions, width].

    `stored` is the vector that was named; otherwise the numbers are still to be read from `sent`.
    """

    sent: Any
    shape: tuple[int, ...]
    stored: Vector | None = None

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """How many numbers one row has."""
        return self.shape[-1]


class VectorReader:
    """Measures and reads vectors; `vectors` collects, by name, the numbers that were sent."""

    def __init__(self, stored: Mapping[str, Vector]) -> None:
        """Bind the stored vectors that may be named."""
        self.stored = stored
        self.vectors: dict[str, Vector] = {}
        # One encoded text in many requests is decoded once.
        self._decoded: dict[tuple[Any, ...], Vector] = {}

    def measure(self, sent: Any) -> SentVector:
        """Find the shape. Raises RefusedError with the rest of a sentence about the field."""
        if isinstance(sent, str):
            return self._named(sent)
        if isinstance(sent, dict):
            return SentVector(sent, _encoded_shape(sent))
        if not isinstance(sent, list):
            msg = f"must be {FORMS}, not {shown(sent)}"
            raise RefusedError(msg)
        if not sent:
            msg = "has no numbers"
            raise RefusedError(msg)
        if is_number(sent[0]) or not isinstance(sent[0], list):
            if not set(map(type, sent)) <= {int, float}:
                msg = f"must hold numbers only, not {shown(sent)}"
                raise RefusedError(msg)
            return SentVector(sent, (len(sent),))
        return SentVector(sent, tensors.measure_numbers(sent).shape)

    def read(self, found: SentVector) -> Vector:
        """Give the vector, its numbers read. Raises RefusedError for numbers that are not good."""
        if found.stored is not None:
            return found.stored
        measured = _rows(found.shape)
        if isinstance(found.sent, dict):
            vector = self.decode(found.sent, measured)
        else:
            rows = [found.sent] if len(found.shape) == 1 else found.sent
            vector = tensors.read_numbers(rows, measured)
        return vector if vector.shape == found.shape else replace(vector, shape=found.shape)

    def decode(self, encoded: dict[str, Any], measured: Measured) -> Vector:
        """Decode the encoded form, or remember what the same text gave before."""
        data = encoded.get("data")
        if not isinstance(data, str) or len(encoded) != len(tensors.ENCODED_FIELDS):
            return tensors.read_encoded(encoded, measured)
        key = (data, *measured.shape, *(shown(encoded.get(name)) for name in _KINDS))
        vector = self._decoded.get(key)
        if vector is None:
            vector = self._decoded[key] = tensors.read_encoded(encoded, measured)
        return vector

    def keep(self, vector: Vector) -> str:
        """Intern a vector unless it is stored already; give its name."""
        name = vector.name
        if name not in self.stored:
            self.vectors.setdefault(name, vector)
        return name

    def _named(self, name: str) -> SentVector:
        stored = self.stored.get(name)
        if stored is None:
            msg = f"names the vector {shown(name)}, which this account does not have"
            raise RefusedError(msg)
        return SentVector(name, stored.shape, stored)


def _encoded_shape(encoded: dict[str, Any]) -> tuple[int, ...]:
    shape = encoded.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) not in (1, 2, 3)
        or not all(is_int(size) and 0 < size < 2**31 for size in shape)
    ):
        msg = (
            f"has the shape {shown(shape)}; it must be [width], [rows, width] or "
            "[layers, positions, width], all positive"
        )
        raise RefusedError(msg)
    return tuple(shape)


def _rows(shape: tuple[int, ...]) -> Measured:
    """See a shape as rows, as readers of numbers do."""
    if len(shape) == 1:
        return Measured(1, None, shape[0])
    return Measured(shape[0], shape[1] if len(shape) == 3 else None, shape[-1])
