"""Checks `apply_steering_vectors` and turns it into interventions, rule by rule.

The order of the rules is a promise: where several are broken, the first of this list is named.

     1  the list is not empty (n and the number of prompts belong here too: validate.py)
     2  number of Steering vectors, numbers in all of them, each position counted
     3  one row a layer, rows of one length            4  layers whole, distinct, not negative
     5  layers and width are the model's               6  numbers and scale within float32
     7  encoded vectors decode, scale x number finite  8  no unknown field
     9  position_indices                              10  position_spans beside other things
    11  spans                                         12  positions that a pass reaches

Rules 2 to 11 do not depend on the prompt; their outcome is remembered for a list that many
requests share. Each rule looks at every vector before the next rule is asked.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from app.catalog import ServedModel
from app.completions import tensors
from app.completions.problems import RefusedError, first_twin, is_int, shown, unknown_field
from app.completions.remembered import Remembered
from app.completions.sent_vectors import VectorReader
from app.completions.sites import offered
from app.completions.spans import of_ranges
from app.completions.tensors import Measured
from app.settings import Limits
from app.steering.spec import Intervention, Op, Site
from app.steering.vectors import Vector

PARAM = "apply_steering_vectors"
FIELDS = frozenset(
    {
        "activations",
        "vector",
        "layer_indices",
        "scale",
        "norm_match",
        "position_indices",
        "position_spans",
    }
)


@dataclass(frozen=True, slots=True)
class Steering:
    """Valid Steering vectors: what to do, the last position they name, how many numbers."""

    interventions: tuple[Intervention, ...]
    last_position: int | None
    numbers: int  # each position counted


@dataclass(slots=True)
class Sent:
    """One Steering vector on its way through the rules."""

    place: str  # "apply_steering_vectors[2]", how messages name it
    fields: dict[str, Any]
    measured: Measured | None = None
    unmeasurable: str | None = None
    shared: bool = False  # a stored [hidden] vector that all layers share
    vector: Vector | None = None
    scale: float = 1.0
    layers: list[int] = field(default_factory=list)

    @property
    def is_encoded(self) -> bool:
        """True for the encoded form."""
        return isinstance(self.fields.get("activations"), dict)

    def refuse(self, message: str) -> RefusedError:
        """Make the error that names this vector."""
        gap = "" if message.startswith(":") else " "
        return RefusedError(f"{self.place}{gap}{message.rstrip('.')}.")


class SteeringRules:
    """The rules of one model for one account."""

    def __init__(self, model: ServedModel, limits: Limits, reader: VectorReader) -> None:
        """Bind what rules look at."""
        self._model = model
        self._limits = limits
        self._reader = reader
        self._checked = Remembered(self._read)

    def read(self, sent: Any) -> Steering:
        """Check rules 1 to 11. Raises RefusedError with the first broken one."""
        return self._checked(sent)

    def _read(self, sent: Any) -> Steering:
        if not isinstance(sent, list):
            msg = f"{PARAM} must be a list of Steering vectors, not {shown(sent)}."
            raise RefusedError(msg)
        if not sent:
            msg = f"{PARAM} is empty. Send at least one Steering vector, or leave the field out."
            raise RefusedError(msg)
        if len(sent) > self._limits.vectors_per_request:
            msg = (
                f"{PARAM} holds {len(sent)} Steering vectors; "
                f"at most {self._limits.vectors_per_request} are allowed."
            )
            raise RefusedError(msg)
        for index, item in enumerate(sent):
            if not isinstance(item, dict):
                msg = f"{PARAM}[{index}] must be an object, not {shown(item)}."
                raise RefusedError(msg)
        vectors = [Sent(f"{PARAM}[{index}]", _sent(item)) for index, item in enumerate(sent)]
        for vector in vectors:
            self._measure(vector)
        numbers = self._count_all(vectors)
        rules: tuple[Callable[[Sent], None], ...] = (
            self._rows,
            self._layers,
            self._fits_model,
            self._numbers,
            self._encoded,
            self._unknown_fields,
            self._position_indices,
            self._spans_alone,
            self._spans,
        )
        for rule in rules:
            for vector in vectors:
                rule(vector)
        for vector in vectors:
            assert vector.vector is not None
            self._reader.keep(vector.vector)
        interventions = tuple(item for vector in vectors for item in _interventions(vector))
        return Steering(interventions, _last_position(interventions), numbers)

    def check_reach(self, steering: Steering, *, prompt_tokens: int, max_tokens: int) -> None:
        """Check rule 12. Raises RefusedError for a position that no forward pass reaches."""
        context = self._model.max_model_len
        reach = min(prompt_tokens + max_tokens, context) - 2
        last = steering.last_position
        if last is None or last <= reach:
            return
        msg = (
            f"{PARAM} steers position {last}, but this request reaches positions 0 to {reach}: "
            f"its prompt has {prompt_tokens} tokens, max_tokens is {max_tokens}, and the last "
            f"generated token never runs through the model. Steer a position up to {reach}"
        )
        longer = last < context - 1
        raise RefusedError(msg + (", or raise max_tokens." if longer else "."))

    def _measure(self, sent: Sent) -> None:
        """Find the sizes; what has none is refused by the rule that needs them."""
        fields = sent.fields
        if ("activations" in fields) == ("vector" in fields):
            return
        try:
            if "vector" in fields:
                name = fields["vector"]
                stored = self._reader.stored.get(name) if isinstance(name, str) else None
                if stored is None:
                    msg = f"names the vector {shown(name)}, which this account does not have"
                    raise RefusedError(msg)
                sent.vector = stored
                shape = stored.shape
                sent.shared = len(shape) == 1
                positions = shape[1] if len(shape) == 3 else None
                sent.measured = Measured(1 if sent.shared else shape[0], positions, shape[-1])
            elif sent.is_encoded:
                sent.measured = tensors.measure_encoded(fields["activations"])
            else:
                sent.measured = tensors.measure_numbers(fields["activations"])
        except RefusedError as refusal:
            what = "" if "vector" in fields else "activations "
            sent.unmeasurable = f"{what}{refusal}"

    def _count_all(self, vectors: list[Sent]) -> int:
        total = 0
        for sent in vectors:
            if sent.measured is None:
                total += tensors.count_numbers(sent.fields.get("activations"))
            elif sent.vector is not None:
                total += sent.measured.count
            else:
                total += sent.measured.count * _copies(sent)
        if total > self._limits.vector_numbers:
            msg = (
                f"{PARAM} holds {total} numbers, each position counted; "
                f"at most {self._limits.vector_numbers} are allowed."
            )
            raise RefusedError(msg)
        return total

    def _rows(self, sent: Sent) -> None:
        fields = sent.fields
        if "activations" not in fields and "vector" not in fields:
            near = [name for name in fields if name not in FIELDS]
            hint = f" ({unknown_field(near[0], FIELDS, of='A Steering vector')})" if near else ""
            raise sent.refuse(f"has no activations{hint}")
        if "activations" in fields and "vector" in fields:
            raise sent.refuse("has both activations and vector; send one of them")
        if sent.unmeasurable is not None and not sent.is_encoded:
            raise sent.refuse(f": {sent.unmeasurable}")
        layers = fields.get("layer_indices")
        if layers is None:
            raise sent.refuse("has no layer_indices; name the layers to steer")
        if not isinstance(layers, list) or sent.measured is None or sent.shared:
            return
        if sent.measured.rows != len(layers):
            msg = (
                f"has {sent.measured.rows} rows of activations for {len(layers)} layers in "
                "layer_indices; send one row for each layer"
            )
            raise sent.refuse(msg)

    def _layers(self, sent: Sent) -> None:
        layers = sent.fields["layer_indices"]
        if not isinstance(layers, list) or not layers or not all(map(is_int, layers)):
            msg = f"has layer_indices {shown(layers)}; it must be a list of layer numbers"
            raise sent.refuse(msg)
        negative = next((layer for layer in layers if layer < 0), None)
        if negative is not None:
            raise sent.refuse(f"names layer {negative}; layers are counted from 0")
        twice = first_twin(layers)
        if twice is not None:
            raise sent.refuse(f"names layer {twice} more than once")
        sent.layers = layers

    def _fits_model(self, sent: Sent) -> None:
        model = self._model
        if Site.resid_post not in model.sites:
            raise sent.refuse(f"cannot act: {offered(model)}")
        missing = next((layer for layer in sent.layers if layer >= model.n_layers), None)
        if missing is not None:
            msg = (
                f"names layer {missing}, but {model.name} has {model.n_layers} layers "
                f"(0 to {model.n_layers - 1})"
            )
            raise sent.refuse(msg)
        if sent.measured is not None and sent.measured.width != model.hidden_size:
            msg = (
                f"has vectors of {sent.measured.width} numbers, but the hidden size of "
                f"{model.name} is {model.hidden_size}"
            )
            raise sent.refuse(msg)

    def _numbers(self, sent: Sent) -> None:
        try:
            if sent.vector is None and not sent.is_encoded:
                assert sent.measured is not None
                sent.vector = tensors.read_numbers(sent.fields["activations"], sent.measured)
            if (scale := sent.fields.get("scale")) is not None:
                sent.scale = tensors.finite_scale(scale)
        except RefusedError as refusal:
            raise sent.refuse(str(refusal)) from None

    def _encoded(self, sent: Sent) -> None:
        try:
            if sent.vector is None:
                if sent.measured is None:
                    raise sent.refuse(f": {sent.unmeasurable}")
                sent.vector = self._reader.decode(sent.fields["activations"], sent.measured)
            tensors.refuse_overflow(sent.vector, sent.scale)
        except RefusedError as refusal:
            if str(refusal).startswith(PARAM):
                raise
            raise sent.refuse(str(refusal)) from None

    def _unknown_fields(self, sent: Sent) -> None:
        for name in sent.fields:
            if name not in FIELDS:
                raise RefusedError(unknown_field(name, FIELDS, of=sent.place))
        norm_match = sent.fields.get("norm_match")
        if norm_match is not None and not isinstance(norm_match, bool):
            raise sent.refuse(f"has norm_match {shown(norm_match)}; it must be true or false")

    def _position_indices(self, sent: Sent) -> None:
        positions = sent.fields.get("position_indices")
        if positions is None:
            return
        assert sent.measured is not None
        if not isinstance(positions, list) or not all(map(is_int, positions)):
            msg = f"has position_indices {shown(positions)}; it must be a list of positions"
            raise sent.refuse(msg)
        if sent.measured.positions is None:
            msg = (
                "has position_indices, but one vector for each layer; send a list of vectors for "
                "each layer, one a position, or use position_spans"
            )
            raise sent.refuse(msg)
        if len(positions) != sent.measured.positions:
            msg = (
                f"has {len(positions)} position_indices for {sent.measured.positions} vectors "
                "a layer; send one position for each vector"
            )
            raise sent.refuse(msg)
        _refuse_negative(sent, positions)

    def _spans_alone(self, sent: Sent) -> None:
        if sent.fields.get("position_spans") is None:
            return
        assert sent.measured is not None
        if sent.fields.get("position_indices") is not None:
            raise sent.refuse("has both position_spans and position_indices; send one of them")
        if sent.measured.positions is not None:
            msg = (
                "has position_spans and a list of vectors for each layer; a span takes one "
                "vector for each layer"
            )
            raise sent.refuse(msg)

    def _spans(self, sent: Sent) -> None:
        spans = sent.fields.get("position_spans")
        if spans is None:
            return
        if not isinstance(spans, list) or not spans or not all(map(_is_pair, spans)):
            msg = (
                f"has position_spans {shown(spans)}; it must be a list of at least one "
                "[start, end] pair"
            )
            raise sent.refuse(msg)
        for start, end in spans:
            if end <= start:
                msg = f"has the span [{start}, {end}], which does not end after it starts"
                raise sent.refuse(msg)
        ordered = sorted(spans)
        for (start, end), (after, _) in pairwise(ordered):
            if after < end:
                raise sent.refuse(f"has spans that overlap at position {max(after, start)}")
        covered = sum(end - start for start, end in spans)
        if covered > self._limits.span_positions:
            msg = (
                f"has spans of {covered} positions in all; "
                f"at most {self._limits.span_positions} are allowed"
            )
            raise sent.refuse(msg)
        _refuse_negative(sent, [start for start, _ in spans])


def _sent(item: dict[str, Any]) -> dict[str, Any]:
    """Leave out known fields that are null: they count as not sent."""
    return {name: value for name, value in item.items() if value is not None or name not in FIELDS}


def _copies(sent: Sent) -> int:
    """How many positions one vector is copied to: those that its spans cover, else one."""
    spans = sent.fields.get("position_spans")
    if not isinstance(spans, list) or not spans or not all(map(_is_pair, spans)):
        return 1
    covered: int = sum(max(0, end - start) for start, end in spans)
    return max(1, covered)


def _is_pair(span: object) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(map(is_int, span))


def _refuse_negative(sent: Sent, positions: list[int]) -> None:
    negative = next((position for position in positions if position < 0), None)
    if negative is not None:
        raise sent.refuse(f"steers position {negative}; positions are counted from 0")


def _interventions(sent: Sent) -> list[Intervention]:
    """Write one intervention a layer; row k of the vector is row k of [rows, width]."""
    assert sent.measured is not None
    assert sent.vector is not None
    spans = sent.fields.get("position_spans")
    count = sent.measured.positions
    positions: tuple[int, ...] | None = None
    if count is not None:
        positions = tuple(sent.fields.get("position_indices") or range(count))
    return [
        Intervention(
            op=Op.add,
            site=Site.resid_post,
            layer=layer,
            vector=sent.vector.name,
            row=0 if sent.shared else index * (count or 1),
            scale=sent.scale,
            norm_match=bool(sent.fields.get("norm_match")),
            positions=positions,
            spans=None if spans is None else of_ranges((start, end) for start, end in spans),
            summed=True,
        )
        for index, layer in enumerate(sent.layers)
    ]


def _last_position(interventions: tuple[Intervention, ...]) -> int | None:
    lasts = [max(item.positions) for item in interventions if item.positions]
    lasts += [max(end for _, end in item.spans) - 1 for item in interventions if item.spans]
    return max(lasts, default=None)
