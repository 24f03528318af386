"""A request as a test asks for it: plain data, from which both sides are made independently.

`to_spec` makes what the engine runs, by way of the product's own reading of `at`; `to_reference`
makes what the plain Hugging Face pass takes, by way of the reference's reading.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from app.completions.at import Reach, read_at, resolve
from app.completions.plans import PlannedOp
from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import FOREVER, Capture, Direction, Intervention, Op, Reduce, Site
from tests.models.families import HEAD_DIM
from tests.reference.positions import positions_of
from worker.engine.vectors import VectorCache

SPECIAL = frozenset({0, 1})


@dataclass(frozen=True)
class Edit:
    """An intervention: rows from `row` on of `matrix`, at `at`; with `by_position` one each.

    `own` holds the op's own fields: scale, norm_match, coeff, low, high.
    """

    op: str
    site: str
    layer: int
    matrix: np.ndarray
    row: int = 0
    at: dict[str, Any] | None = None
    by_position: bool = False
    own: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, ...] | None = None
    head_dim: int = HEAD_DIM
    summed: bool = False
    form: str = ""

    @property
    def kind(self) -> str:
        """The op, as the dimension of that name calls it."""
        if self.summed:
            return "summed"
        return "norm_match" if self.own.get("norm_match") else self.op


@dataclass(frozen=True)
class Read:
    """A capture; `directions` [k, width] belong to the reduction "project"."""

    name: str
    site: str
    layers: tuple[int, ...]
    at: dict[str, Any] | None = None
    before: bool = False
    reduce: str = "none"
    directions: np.ndarray | None = None
    unit: bool = True
    form: str = ""


@dataclass(frozen=True)
class Asked:
    """A request: greedy, `tokens` tokens long."""

    prompt: tuple[int, ...]
    tokens: int
    edits: tuple[Edit, ...] = ()
    reads: tuple[Read, ...] = ()

    @property
    def ran(self) -> int:
        """How many positions run: all but that of the last token."""
        return len(self.prompt) + self.tokens - 1

    @property
    def kinds(self) -> list[str]:
        """Name what it has: ops, sites, forms, reductions and what is special about them."""
        names = []
        ordered = [(edit.site, edit.layer) for edit in self.edits if not edit.summed]
        if len(set(ordered)) < len(ordered):
            names.append("several in order")
        for edit in self.edits:
            names += [edit.kind, edit.site, edit.form, *(["heads"] if edit.heads else [])]
        for read in self.reads:
            names += [read.reduce, read.site, read.form, "before" if read.before else "after"]
        return names


def to_spec(asked: Asked, vectors: VectorCache) -> RequestSpec:
    """Make the request that the engine runs, and store its vectors."""
    interventions: list[Intervention] = []
    for edit in asked.edits:
        bare = _intervention(edit, _stored(edit.matrix, vectors))
        if edit.summed and edit.by_position:
            # Steering vectors have positions of their own, which may come more than once.
            interventions.append(replace(bare, positions=tuple((edit.at or {})["positions"])))
            continue
        planned = PlannedOp(
            name="edit",
            at=read_at(edit.at, positions_max=None),
            bare=(bare,),
            by_position=edit.by_position,
        )
        interventions += planned.place(*_reach(asked))
    return RequestSpec(
        prompt_token_ids=asked.prompt,
        prompt=None,
        sampling=Sampling(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True),
        interventions=tuple(interventions),
        captures=tuple(_capture(read, asked, vectors) for read in asked.reads),
    )


def to_reference(asked: Asked) -> dict[str, Any]:
    """Make the plain edits and reads of the reference."""
    prompt, ran = list(asked.prompt), asked.ran
    return {
        "edits": [_plain_edit(edit, prompt, ran) for edit in asked.edits],
        "reads": [
            {
                "name": read.name,
                "site": read.site,
                "layers": read.layers,
                "positions": positions_of(read.at, prompt, ran, set(SPECIAL)),
                "before": read.before,
                "reduce": read.reduce,
                "directions": read.directions,
                "unit": read.unit,
            }
            for read in asked.reads
        ],
    }


def _plain_edit(edit: Edit, prompt: list[int], ran: int) -> dict[str, Any]:
    inside = set(positions_of(edit.at, prompt, ran, set(SPECIAL)))
    if edit.by_position:
        named = (edit.at or {})["positions"]
        steers = [
            (position, edit.matrix[edit.row + k])
            for k, position in enumerate(named)
            if position in inside
        ]
    else:
        steers = [(position, edit.matrix[edit.row]) for position in sorted(inside)]
    return {
        "op": edit.op,
        "site": edit.site,
        "layer": edit.layer,
        "steers": steers,
        "heads": edit.heads,
        "head_dim": edit.head_dim,
        "summed": edit.summed,
        **edit.own,
    }


def _intervention(edit: Edit, vector: str) -> Intervention:
    return Intervention(
        op=Op(edit.op),
        site=Site(edit.site),
        layer=edit.layer,
        vector=vector,
        row=edit.row,
        heads=edit.heads,
        summed=edit.summed,
        **edit.own,
    )


def _capture(read: Read, asked: Asked, vectors: VectorCache) -> Capture:
    directions: tuple[Direction, ...] = ()
    if read.directions is not None:
        name = _stored(read.directions, vectors)
        directions = tuple(Direction(name, row) for row in range(len(read.directions)))
    return Capture(
        name=read.name,
        site=Site(read.site),
        layers=read.layers,
        spans=resolve(
            read_at(read.at, positions_max=None), len(asked.prompt), asked.prompt, SPECIAL
        ),
        before=read.before,
        reduce=Reduce(read.reduce),
        directions=directions,
        unit=read.unit,
    )


def _reach(asked: Asked) -> tuple[Reach, tuple[int, ...]]:
    special = tuple(place for place, token in enumerate(asked.prompt) if token in SPECIAL)
    return Reach(len(asked.prompt), asked.tokens, FOREVER), special


def _stored(matrix: np.ndarray, vectors: VectorCache) -> str:
    assert matrix.dtype == np.float32
    content = np.ascontiguousarray(matrix)
    name = "sv_" + hashlib.sha256(repr(content.shape).encode() + content.tobytes()).hexdigest()
    vectors.put(name, content)
    return name
