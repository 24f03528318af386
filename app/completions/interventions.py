"""Checks `interventions` and plans them, rule by rule.

The order of the rules is a promise: where several are broken, the first of this list is named.

     1  a list of 1 to 16 objects              2  op
     3  no field that the op does not have     4  site, one that the model has
     5  layers                                 6  heads
     7  at, without the prompt                 8  one of vector, vectors, from; what it refers to
     9  numbers in all, each position counted 10  shapes: rows, positions, width
    11  scale, norm_match, coeff, min, max    12  numbers in range, encoded vectors decode
    13  rows of `from` can be had             14  positions that a pass reaches, at least one

Rules 1 to 13 do not depend on the prompt; their outcome is remembered for a list that many
requests share. Each rule looks at every intervention before the next rule is asked. Numbers of
Steering vectors beside them count towards rule 9 (validate.py), and rule 14 is plans.py's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from app.catalog import ServedModel
from app.completions import tensors
from app.completions.at import EVERYWHERE, At, Phase, read_at
from app.completions.layers import read_layers
from app.completions.plans import OpPlan, PlannedOp
from app.completions.problems import (
    RefusedError,
    first_twin,
    is_int,
    is_number,
    sentence,
    shown,
    unknown_field,
)
from app.completions.remembered import Remembered
from app.completions.rows_of import RowsOf, read_rows_of
from app.completions.sent_vectors import SentVector, VectorReader
from app.completions.sites import read_site
from app.settings import Limits
from app.steering.spec import Intervention, Op, Site
from app.steering.vectors import Vector

PARAM: Final = "interventions"
COMMON: Final = frozenset({"op", "layers", "site", "vector", "vectors", "heads", "at"})
OWN: Final = {
    Op.add: frozenset({"scale", "norm_match"}),
    Op.orthogonal: frozenset({"coeff"}),
    Op.cap: frozenset({"min", "max"}),
    Op.replace: frozenset({"from"}),
}
SOURCES: Final = ("vector", "vectors", "from")


@dataclass(slots=True)
class Sent:
    """One intervention on its way through the rules."""

    place: str  # "interventions[2]", how messages name it
    fields: dict[str, Any]
    op: Op = Op.add
    site: Site = Site.resid_post
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    at: At = EVERYWHERE
    parts: list[SentVector] = field(default_factory=list)  # one for all layers, or one a layer
    rows_of: RowsOf | None = None
    numbers: dict[str, float] = field(default_factory=dict)  # scale, coeff, min, max
    vectors: list[Vector] = field(default_factory=list)

    def refuse(self, message: str) -> RefusedError:
        """Make the error that names this intervention."""
        gap = "" if message.startswith((":", ".")) else " "
        return RefusedError(sentence(f"{self.place}{gap}{message}"))


class InterventionRules:
    """The rules of one model for one account."""

    def __init__(
        self,
        model: ServedModel,
        limits: Limits,
        reader: VectorReader,
        captured: Mapping[RowsOf, Vector | str],
    ) -> None:
        """Bind what rules look at; `captured` holds the rows, or why they cannot be had."""
        self._model = model
        self._limits = limits
        self._reader = reader
        self._captured = captured
        self._checked = Remembered(self._read)

    def read(self, sent: Any, *, numbers_beside: int = 0) -> OpPlan:
        """Check rules 1 to 13. Raises RefusedError with the first broken one."""
        plan = self._checked(sent)
        total = plan.numbers + numbers_beside
        if total > self._limits.vector_numbers:
            msg = (
                f"{PARAM} and apply_steering_vectors hold {total} numbers together, each position "
                f"counted; at most {self._limits.vector_numbers} are allowed."
            )
            raise RefusedError(msg)
        return plan

    def _read(self, sent: Any) -> OpPlan:
        most = self._limits.interventions_per_request
        if not isinstance(sent, list):
            msg = f"{PARAM} must be a list of interventions, not {shown(sent)}."
            raise RefusedError(msg)
        if not 0 < len(sent) <= most:
            msg = f"{PARAM} holds {len(sent)} interventions; 1 to {most} are allowed."
            raise RefusedError(msg if sent else msg + " Leave the field out to have none.")
        for index, item in enumerate(sent):
            if not isinstance(item, dict):
                msg = f"{PARAM}[{index}] must be an object, not {shown(item)}."
                raise RefusedError(msg)
        items = [Sent(f"{PARAM}[{index}]", item) for index, item in enumerate(sent)]
        self._each(items, _op, _known_fields, self._site, self._layers, self._heads, self._at)
        self._each(items, self._sources)
        numbers = self._count_all(items)
        self._each(items, self._shapes, _own_numbers, self._read_numbers, self._take_captured)
        return OpPlan(
            tuple(map(self._plan, items)),
            numbers=numbers,
            pieces_max=self._limits.placed_interventions,
            stretches_max=self._limits.placed_stretches,
        )

    @staticmethod
    def _each(items: list[Sent], *rules: Callable[[Sent], None]) -> None:
        """Ask one rule after the other about every intervention."""
        for rule in rules:
            for item in items:
                try:
                    rule(item)
                except RefusedError as refusal:
                    text = str(refusal)
                    raise (refusal if text.startswith(PARAM) else item.refuse(text)) from None

    def _site(self, sent: Sent) -> None:
        sent.site = read_site(sent.fields.get("site"), self._model)

    def _layers(self, sent: Sent) -> None:
        try:
            sent.layers = read_layers(sent.fields.get("layers"), self._model)
        except RefusedError as refusal:
            msg = f".layers {refusal}"
            raise RefusedError(msg) from None

    def _heads(self, sent: Sent) -> None:
        heads = sent.fields.get("heads")
        if heads is None:
            return
        if sent.site is not Site.z:
            msg = f'has heads, but its site is {sent.site}; heads are slices of the site "z" alone'
            raise RefusedError(msg)
        if not isinstance(heads, list) or not heads or not all(map(is_int, heads)):
            msg = f"has heads {shown(heads)}; it must be a list of at least one head number"
            raise RefusedError(msg)
        count = self._model.n_heads
        missing = next((head for head in heads if not 0 <= head < count), None)
        if missing is not None:
            msg = (
                f"names head {missing}, but {self._model.name} has {count} heads (0 to {count - 1})"
            )
            raise RefusedError(msg)
        twice = first_twin(heads)
        if twice is not None:
            msg = f"names head {twice} more than once"
            raise RefusedError(msg)
        sent.heads = tuple(sorted(heads))

    def _at(self, sent: Sent) -> None:
        try:
            sent.at = read_at(sent.fields.get("at"), positions_max=self._limits.span_positions)
        except RefusedError as refusal:
            msg = f".at {refusal}"
            raise RefusedError(msg) from None

    def _sources(self, sent: Sent) -> None:
        present = [name for name in SOURCES if sent.fields.get(name) is not None]
        allowed = SOURCES if sent.op is Op.replace else SOURCES[:2]
        if len(present) != 1:
            has = f"both {present[0]} and {present[1]}" if present else "no numbers"
            msg = f"has {has}; send one of {', '.join(allowed)}"
            raise RefusedError(msg)
        (name,) = present
        value = sent.fields[name]
        try:
            if name == "from":
                self._from(sent, value)
            elif name == "vector":
                sent.parts = [self._reader.measure(value)]
            else:
                sent.parts = self._measure_list(sent, value)
        except RefusedError as refusal:
            text = str(refusal)
            msg = text if text.startswith(".") else f".{name} {text}"
            raise RefusedError(msg) from None

    def _from(self, sent: Sent, value: Any) -> None:
        sent.rows_of = rows_of = read_rows_of(
            value, sent.at.positions, custom_id_chars=self._limits.custom_id_chars
        )
        if sent.at.positions is None:
            if sent.at.spans is not None or sent.at.phase is not Phase.all:
                msg = (
                    "takes one row for each position, so at must name as many positions; "
                    "send at.positions, or leave at out to write to the positions of from"
                )
                raise RefusedError(msg)
            sent.at = replace(sent.at, positions=rows_of.positions)
        elif len(sent.at.positions) != len(rows_of.positions):
            msg = (
                f"names {len(rows_of.positions)} positions, but at names "
                f"{len(sent.at.positions)}; each row goes to one position"
            )
            raise RefusedError(msg)

    def _measure_list(self, sent: Sent, value: Any) -> list[SentVector]:
        if not isinstance(value, list):
            msg = f"must be a list with one vector for each layer, not {shown(value)}"
            raise RefusedError(msg)
        if len(value) != len(sent.layers):
            msg = (
                f"holds {len(value)} vectors for {len(sent.layers)} layers; send one for each, "
                "or vector for one that all layers share"
            )
            raise RefusedError(msg)
        parts: list[SentVector] = []
        for index, item in enumerate(value):
            try:
                parts.append(self._reader.measure(item))
            except RefusedError as refusal:
                msg = f".vectors[{index}] {refusal}"
                raise RefusedError(msg) from None
        return parts

    def _count_all(self, items: list[Sent]) -> int:
        total = 0
        for sent in items:
            if sent.rows_of is not None:
                total += len(sent.rows_of.positions) * self._model.site_width(sent.site)
            for part in sent.parts:
                # A stored vector, and one a position, is there once however far it goes.
                once = part.stored is not None or len(part.shape) == 3
                total += part.count * (1 if once else sent.at.copies)
        if total > self._limits.vector_numbers:
            msg = (
                f"{PARAM} holds {total} numbers, each position counted; "
                f"at most {self._limits.vector_numbers} are allowed."
            )
            raise RefusedError(msg)
        return total

    def _shapes(self, sent: Sent) -> None:
        width = self._model.site_width(sent.site)
        alone = sent.fields.get("vector") is not None
        for index, part in enumerate(sent.parts):
            name = ".vector" if alone else f".vectors[{index}]"
            if part.width != width:
                msg = (
                    f"{name} has rows of {part.width} numbers, but the site {sent.site} of "
                    f"{self._model.name} is {width} wide"
                )
                raise RefusedError(msg)
            if alone:
                _fits_layers(sent, part)
            elif len(part.shape) > 2 or part.count != width:
                msg = f"{name} has the shape {list(part.shape)}; it must be one vector, [{width}]"
                raise RefusedError(msg)

    def _read_numbers(self, sent: Sent) -> None:
        for part in sent.parts:
            try:
                vector = self._reader.read(part)
                if sent.op is Op.add:
                    tensors.refuse_overflow(vector, sent.numbers.get("scale", 1.0))
            except RefusedError as refusal:
                raise sent.refuse(str(refusal)) from None
            sent.vectors.append(vector)

    def _take_captured(self, sent: Sent) -> None:
        rows_of = sent.rows_of
        if rows_of is None:
            return
        found = self._captured.get(rows_of)
        if found is None:
            msg = (
                ".from names rows that this account does not have: look up the Job, the request, "
                "and which layers and positions it captured"
            )
            raise RefusedError(msg)
        if isinstance(found, str):
            msg = f".from cannot be had: {found}"
            raise RefusedError(msg)
        shape = (len(rows_of.positions), self._model.site_width(sent.site))
        if found.shape != shape:
            msg = (
                f".from gives rows of the shape {list(found.shape)}, but {list(shape)} is needed: "
                f"the site {sent.site} of {self._model.name} is {shape[1]} wide"
            )
            raise RefusedError(msg)
        sent.vectors.append(found)

    def _plan(self, sent: Sent) -> PlannedOp:
        """Write one intervention a layer; row k of a vector is row k of [rows, width]."""
        names = [self._reader.keep(vector) for vector in sent.vectors]
        shape = sent.vectors[0].shape
        by_position = sent.rows_of is not None or len(shape) == 3
        # Rows from one layer to the next: none when all layers share one vector or its rows.
        stride = 0
        if len(sent.vectors) == 1 and sent.rows_of is None:
            stride = {1: 0, 2: 1, 3: shape[1] if len(shape) == 3 else 0}[len(shape)]
        return PlannedOp(
            sent.place,
            sent.at,
            tuple(
                Intervention(
                    op=sent.op,
                    site=sent.site,
                    layer=layer,
                    vector=names[index if len(names) > 1 else 0],
                    row=index * stride,
                    scale=sent.numbers.get("scale", 1.0),
                    norm_match=bool(sent.fields.get("norm_match")),
                    coeff=sent.numbers.get("coeff", 0.0) if sent.op is Op.orthogonal else None,
                    low=sent.numbers.get("min"),
                    high=sent.numbers.get("max"),
                    heads=sent.heads,
                )
                for index, layer in enumerate(sent.layers)
            ),
            by_position=by_position,
        )


def _op(sent: Sent) -> None:
    op = sent.fields.get("op")
    if not isinstance(op, str) or op not in set(Op):
        what = "has no op" if op is None else f"has the op {shown(op)}"
        msg = f"{what}; it must be one of {', '.join(Op)}"
        raise RefusedError(msg)
    sent.op = Op(op)


def _known_fields(sent: Sent) -> None:
    known = COMMON | OWN[sent.op]
    for name in sent.fields:
        if name not in known:
            owner = next((op for op, own in OWN.items() if name in own), None)
            text = unknown_field(name, known, of=f"The op {sent.op}")
            if owner is not None:
                text = f"The op {sent.op} has no field {name!r}; it belongs to {owner}"
            raise RefusedError(f"is wrong: {text}")


def _fits_layers(sent: Sent, part: SentVector) -> None:
    shape, layers = part.shape, len(sent.layers)
    if len(shape) == 1:
        return
    if shape[0] != layers:
        msg = (
            f".vector has {shape[0]} rows for {layers} layers; send [width] for one vector that "
            "all layers share, [layers, width] for one row a layer, or [layers, positions, width]"
        )
        raise RefusedError(msg)
    if len(shape) == 2:
        return
    positions = sent.at.positions
    if positions is None:
        msg = (
            f".vector has {shape[1]} rows a layer, one for each position, but at names no "
            "positions; send at.positions, or one row a layer"
        )
        raise RefusedError(msg)
    if len(positions) != shape[1]:
        msg = (
            f".vector has {shape[1]} rows a layer for {len(positions)} positions in at; send one "
            "row for each position"
        )
        raise RefusedError(msg)


def _own_numbers(sent: Sent) -> None:
    for name in ("scale", "coeff", "min", "max"):
        value = sent.fields.get(name)
        if value is not None:
            sent.numbers[name] = _number(name, value)
    norm_match = sent.fields.get("norm_match")
    if norm_match is not None and not isinstance(norm_match, bool):
        msg = f"has norm_match {shown(norm_match)}; it must be true or false"
        raise RefusedError(msg)
    if sent.op is not Op.cap:
        return
    low, high = sent.numbers.get("min"), sent.numbers.get("max")
    if low is None and high is None:
        msg = "has neither min nor max; send at least one of them (the other side is then open)"
        raise RefusedError(msg)
    if low is not None and high is not None and low > high:
        msg = f"has min {low!r} over max {high!r}; send them the other way round"
        raise RefusedError(msg)


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        msg = f"has {name} {shown(value)}; it must be a number"
        raise RefusedError(msg)
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(value)):
            msg = f"has {name} {value!r}, which is outside the range of float32"
            raise RefusedError(msg)
    return float(value)
