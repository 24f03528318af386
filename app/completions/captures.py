"""Checks `output_residual_stream` and `captures`, plans them, and counts the bytes they need.

Each capture is checked in the order of its fields: no unknown one, name, site, layers, at, when,
reduce. A list that many requests share is checked once; its positions are resolved for each
prompt (plans.py).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from app.catalog import ServedModel
from app.completions.at import read_at
from app.completions.layers import read_layers
from app.completions.plans import CapturePlan, PlannedCapture
from app.completions.problems import (
    Problem,
    RefusedError,
    first_twin,
    sentence,
    shown,
    unknown_field,
)
from app.completions.remembered import Remembered
from app.completions.sent_vectors import SentVector, VectorReader
from app.completions.sites import offered, read_site
from app.settings import Limits
from app.steering.spec import Capture, Direction, Reduce, Site
from app.steering.vectors import ITEM_BYTES, Vector

PARAM: Final = "captures"
RESIDUAL_STREAM: Final = "residual_stream"  # the capture that output_residual_stream asks for
STREAM_PARAM: Final = "output_residual_stream"
CAPTURES_MAX: Final = 16
FIELDS: Final = frozenset({"name", "layers", "site", "at", "when", "reduce"})
PROJECT_FIELDS: Final = frozenset({"project", "unit"})
REDUCED: Final = (Reduce.none, Reduce.mean, Reduce.norm)
REDUCED_ITEM_BYTES: Final = 4
_NAME = re.compile(r"[a-z0-9_]{1,64}")
_REDUCES: Final = '"none", "mean", "norm" or {"project": vector(s), "unit": true}'


def capture_bytes(captures: tuple[Capture, ...], model: ServedModel, *, rows: int) -> int:
    """Count the bytes of captures of a request that runs positions 0 to rows - 1.

    The rows of a mean are kept until it is taken, so it counts like the rows themselves.
    """
    total = 0
    for capture in captures:
        whole = capture.reduce in (Reduce.none, Reduce.mean)
        item = ITEM_BYTES[model.dtype] if whole else REDUCED_ITEM_BYTES
        width = capture.width(model.site_width(capture.site))
        total += len(capture.layers) * capture.rows(rows) * width * item
    return total


class CaptureRules:
    """The rules of one model for one account."""

    def __init__(self, model: ServedModel, limits: Limits, reader: VectorReader) -> None:
        """Bind what rules look at."""
        self._model = model
        self._limits = limits
        self._reader = reader
        self._checked = Remembered(lambda sent: CapturePlan(self._read(sent)))

    def read_stream(self, body: Mapping[str, Any], problems: list[Problem]) -> Capture | None:
        """Give the capture that output_residual_stream asks for; add what is wrong with it."""
        asked = body.get(STREAM_PARAM)
        if asked is None or asked is False:
            return None
        try:
            if Site.resid_post not in self._model.sites:
                msg = f"cannot be read: {offered(self._model)}"
                raise RefusedError(msg)
            layers = read_layers(asked, self._model)
        except RefusedError as refusal:
            problems.append(Problem(STREAM_PARAM, f"{STREAM_PARAM} {refusal}."))
            return None
        return Capture(RESIDUAL_STREAM, Site.resid_post, tuple(sorted(layers)))

    def read(self, body: Mapping[str, Any], problems: list[Problem]) -> CapturePlan | None:
        """Plan the named captures of a body; add what is wrong with them."""
        sent = body.get(PARAM)
        if sent is None:
            return None
        try:
            return self._checked(sent)
        except RefusedError as refusal:
            problems.append(Problem(PARAM, sentence(f"{PARAM}{refusal}")))
            return None

    def _read(self, sent: Any) -> tuple[PlannedCapture, ...]:
        if not isinstance(sent, list) or not all(isinstance(item, dict) for item in sent):
            msg = f" must be a list of objects, not {shown(sent)}"
            raise RefusedError(msg)
        if not 0 < len(sent) <= CAPTURES_MAX:
            msg = f" holds {len(sent)} captures; 1 to {CAPTURES_MAX} are allowed"
            raise RefusedError(msg)
        captures: list[PlannedCapture] = []
        for index, item in enumerate(sent):
            try:
                captures.append(self._one(f"{PARAM}[{index}]", item))
            except RefusedError as refusal:
                text = str(refusal)
                msg = f"[{index}]{text if text.startswith('.') else ' ' + text}"
                raise RefusedError(msg) from None
        twice = first_twin(capture.bare.name for capture in captures)
        if twice is not None:
            msg = f" holds the name {twice!r} more than once; each capture needs its own"
            raise RefusedError(msg)
        return tuple(captures)

    def _one(self, place: str, item: dict[str, Any]) -> PlannedCapture:
        for key in item:
            if key not in FIELDS:
                raise RefusedError("is wrong: " + unknown_field(key, FIELDS, of="a capture"))
        name = item.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == RESIDUAL_STREAM:
            msg = (
                f"has the name {shown(name)}; use 1 to 64 of a-z, 0-9 and _, and not "
                f"{RESIDUAL_STREAM!r}, which output_residual_stream uses"
            )
            raise RefusedError(msg)
        site = read_site(item.get("site"), self._model)
        try:
            layers = read_layers(item.get("layers"), self._model)
        except RefusedError as refusal:
            msg = f".layers {refusal}"
            raise RefusedError(msg) from None
        try:
            at = read_at(item.get("at"), positions_max=None)
        except RefusedError as refusal:
            msg = f".at {refusal}"
            raise RefusedError(msg) from None
        when = item.get("when", "after")
        if when not in (None, "after", "before"):
            msg = f'has when {shown(when)}; it must be "after" or "before" the ops of the layer'
            raise RefusedError(msg)
        reduce, directions, unit = self._reduce(item.get("reduce"), site)
        bare = Capture(
            name,
            site,
            tuple(sorted(layers)),
            before=when == "before",
            reduce=reduce,
            directions=directions,
            unit=unit,
        )
        return PlannedCapture(place, at, bare)

    def _reduce(self, sent: Any, site: Site) -> tuple[Reduce, tuple[Direction, ...], bool]:
        if sent is None:
            return Reduce.none, (), False
        if isinstance(sent, str) and sent in REDUCED:
            return Reduce(sent), (), False
        if not isinstance(sent, dict):
            msg = f"has reduce {shown(sent)}; it must be {_REDUCES}"
            raise RefusedError(msg)
        for key in sent:
            if key not in PROJECT_FIELDS:
                raise RefusedError("is wrong: " + unknown_field(key, PROJECT_FIELDS, of="reduce"))
        unit = sent.get("unit")
        if unit is not None and not isinstance(unit, bool):
            msg = f".reduce.unit is {shown(unit)}; it must be true or false"
            raise RefusedError(msg)
        try:
            directions = self._directions(sent.get("project"), site)
        except RefusedError as refusal:
            text = str(refusal)
            msg = f".reduce.project{text if text.startswith('[') else ' ' + text}"
            raise RefusedError(msg) from None
        return Reduce.project, directions, unit is not False

    def _directions(self, sent: Any, site: Site) -> tuple[Direction, ...]:
        """Read one vector, [k, width] numbers, or a list of vectors and names."""
        if sent is None:
            msg = "is missing; send one vector, or a list of vectors"
            raise RefusedError(msg)
        if not isinstance(sent, list) or not any(isinstance(item, str | dict) for item in sent):
            return self._rows([self._measure(sent, site)])
        most = self._limits.capture_directions
        if len(sent) > most:
            msg = f"holds {len(sent)} vectors; at most {most} directions are allowed"
            raise RefusedError(msg)
        parts: list[SentVector] = []
        for index, item in enumerate(sent):
            try:
                parts.append(self._measure(item, site))
            except RefusedError as refusal:
                msg = f"[{index}] {refusal}"
                raise RefusedError(msg) from None
        return self._rows(parts)

    def _measure(self, sent: Any, site: Site) -> SentVector:
        part = self._reader.measure(sent)
        width = self._model.site_width(site)
        if part.width != width or len(part.shape) > 2:
            msg = (
                f"has the shape {list(part.shape)}; it must be [{width}] or [directions, {width}], "
                f"as the site {site} of {self._model.name} is {width} wide"
            )
            raise RefusedError(msg)
        return part

    def _rows(self, parts: list[SentVector]) -> tuple[Direction, ...]:
        total = sum(part.count // part.width for part in parts)
        most = self._limits.capture_directions
        if total > most:
            msg = f"holds {total} directions; at most {most} are allowed"
            raise RefusedError(msg)
        vectors: list[Vector] = [self._reader.read(part) for part in parts]
        return tuple(
            Direction(name, row)
            for part, vector in zip(parts, vectors, strict=True)
            for name in [self._reader.keep(vector)]
            for row in range(part.count // part.width)
        )
