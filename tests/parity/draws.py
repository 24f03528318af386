"""Draw requests: for one combination of dimensions, or at random from all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from tests.models.families import FAMILIES, VOCAB, Family
from tests.parity.asked import SPECIAL, Asked, Edit, Read
from tests.parity.dimensions import FORMS, OPS, SITES, WITHOUT_MID, Combination
from tests.reference.positions import positions_of

REDUCTIONS = ("none", "mean", "norm", "project")
# How often a request is crowded, a row of a vector is zero, and a lone norm_match is beyond reason.
CROWDED, ZERO, EXTREME = 0.2, 0.05, 0.3


class Dice:
    """Random choices and numbers from one seed."""

    def __init__(self, seed: object) -> None:
        self.choices = random.Random(repr(seed))
        self._numbers = np.random.default_rng(self.choices.getrandbits(64))

    def matrix(self, rows: int, width: int) -> np.ndarray:
        """Draw rows of about length sqrt(width)."""
        return self._numbers.normal(size=(rows, width)).astype(np.float32)

    def prompt(self, length: int) -> tuple[int, ...]:
        """Draw a prompt with special tokens here and there."""
        ids = [self.choices.randrange(2, VOCAB) for _ in range(length)]
        if self.choices.random() < 0.7:
            ids[0] = 0
        for _ in range(length // 12):
            ids[self.choices.randrange(length)] = 1
        return tuple(ids)


def sites_of(family: str) -> tuple[str, ...]:
    """Return the sites that a family has."""
    return tuple(site for site in SITES if not (site == "resid_mid" and family in WITHOUT_MID))


def for_combination(combination: Combination, *, prompt: int, tokens: int) -> Asked:
    """Draw a request that holds a combination's op, site and form, and reads what it does.

    It reads its layer and site before and after, and the stream after every layer. A request that
    is to come from the cache reads only what it generates: reading its prompt would rule that out.
    """
    family = FAMILIES[combination.family]
    dice = Dice(tuple(combination))
    rng = dice.choices
    ids = dice.prompt(prompt)
    layer = rng.randrange(family.layers)
    edits = _edits(
        dice,
        combination.op,
        combination.site,
        layer,
        family=family,
        form=combination.form,
        prompt=ids,
        tokens=tokens,
    )
    at = {"phase": "generated"} if combination.condition == "cached" else None
    layers = tuple(range(family.layers))
    return Asked(
        prompt=ids,
        tokens=tokens,
        edits=tuple(edits),
        reads=(
            Read("after", combination.site, (layer,), at),
            Read("before", combination.site, (layer,), at, before=True),
            Read("stream", "resid_post", layers, at),
        ),
    )


def at_random(
    dice: Dice,
    family: Family,
    *,
    prompt: tuple[int, int] = (1, 40),
    tokens: tuple[int, int] = (1, 9),
    ids: tuple[int, ...] | None = None,
) -> Asked:
    """Draw a request with 0 to 4 interventions and 0 to 3 captures of any kind.

    Some are crowded: up to 8 interventions at one layer and site, to be done in their order.
    `prompt` and `tokens` are the least and the greatest length; the least comes often. `ids` is
    the prompt, instead of a random one.
    """
    rng = dice.choices
    if ids is None:
        ids = dice.prompt(rng.choice([prompt[0], *(rng.randint(*prompt) for _ in range(5))]))
    length = rng.choice([tokens[0], *(rng.randint(*tokens) for _ in range(5))])
    sites = sites_of(family.name)
    places = [(site, layer) for site in sites for layer in range(family.layers)]
    count = rng.choice([0, 1, 1, 2, 3, 4])
    if rng.random() < CROWDED:
        count, places = rng.randrange(3, 9), [rng.choice(places)]
    edits: list[Edit] = []
    for _ in range(count):
        site, layer = rng.choice(places)
        edits += _edits(
            dice,
            rng.choice(OPS),
            site,
            layer,
            family=family,
            form=rng.choice(FORMS),
            prompt=ids,
            tokens=length,
            zero=ZERO,
        )
    reads = [
        _read(dice, f"read{number}", rng.choice(sites), family=family, prompt=ids, tokens=length)
        for number in range(rng.choice([0, 1, 2, 3]))
    ]
    if len(edits) == 1 and edits[0].kind == "norm_match" and rng.random() < EXTREME:
        edits = [replace(edits[0], own={"scale": 2e6, "norm_match": True})]
    # As the service does: Steering vectors come before interventions.
    edits.sort(key=lambda edit: not edit.summed)
    return Asked(prompt=ids, tokens=length, edits=tuple(edits), reads=tuple(reads))


def at_for(dice: Dice, form: str, prompt: tuple[int, ...], tokens: int) -> dict[str, Any] | None:
    """Draw an `at` of a form that takes in some position which runs, if it can."""
    ran = len(prompt) + tokens - 1
    while True:
        at = _at_for(dice, form, prompt, tokens)
        if positions_of(at, list(prompt), ran, set(SPECIAL)):
            return at
        if form == "generated":
            assert tokens == 1
            return at
        if form == "exclude":  # there are special tokens alone, and one must be left
            return {"exclude": list(range(1, ran))} if ran > 1 else None


def _at_for(dice: Dice, form: str, prompt: tuple[int, ...], tokens: int) -> dict[str, Any] | None:
    rng = dice.choices
    length = len(prompt)
    ran = length + tokens - 1
    if form == "all":
        return rng.choice([None, {"phase": "all"}])
    if form in ("prompt", "generated", "last"):
        return {"phase": form}
    if form == "positions":
        positions = rng.sample(range(ran), rng.randrange(1, min(ran, 6) + 1))
        if len(positions) > 1 and rng.random() < 0.25:
            return {"positions": positions, "exclude": [rng.choice(positions)]}
        return {"positions": positions}
    if form == "spans":
        edges = sorted(rng.sample(range(ran + 1), 2))
        spans = [edges]
        if edges[1] + 1 < ran and rng.random() < 0.6:
            spans.insert(0, sorted(rng.sample(range(edges[1] + 1, ran + 1), 2)))
        return {"spans": spans}
    if form == "steps":
        first = rng.randrange(tokens)
        return {"steps": [first, rng.randrange(first, tokens) + 1]}
    assert form == "exclude", form
    if ran > 2 and rng.random() < 0.5:
        return {"exclude": sorted(rng.sample(range(ran), rng.randrange(1, min(ran, 8))))}
    at = {"exclude": "special_tokens"}
    if tokens > 2 and rng.random() < 0.5:
        at |= {"steps": [0, tokens - 1]}
    return at


def _edits(
    dice: Dice,
    op: str,
    site: str,
    layer: int,
    *,
    family: Family,
    form: str,
    prompt: tuple[int, ...],
    tokens: int,
    zero: float = 0.0,
) -> list[Edit]:
    """Draw the interventions of one op; "summed" is a pair that adds up.

    A row of a vector is zero with probability `zero`.
    """
    rng = dice.choices
    at = at_for(dice, form, prompt, tokens)
    if op == "summed" and form == "positions":
        ran = len(prompt) + tokens - 1
        at = {"positions": rng.choices(range(ran), k=rng.randrange(1, 7))}
    width = family.z_width if site == "z" else family.width
    heads = None
    if site == "z" and rng.random() < 0.5:
        heads = tuple(rng.sample(range(family.heads), rng.randrange(1, family.heads)))
    kinds = ["add", "norm_match"] if op == "summed" else [op]
    edits = []
    for kind in kinds:
        by_position = form == "positions"
        row = rng.randrange(3)
        rows = row + (len((at or {})["positions"]) if by_position else 1)
        matrix = dice.matrix(rows, width)
        matrix[[rng.random() < zero for _ in range(rows)]] = 0
        edits.append(
            Edit(
                op="add" if kind == "norm_match" else kind,
                site=site,
                layer=layer,
                matrix=matrix,
                row=row,
                at=at,
                by_position=by_position,
                own=_own(rng, kind),
                heads=None if op == "summed" else heads,
                head_dim=family.head_dim,
                summed=op == "summed",
                form=form,
            )
        )
    return edits


def _own(rng: random.Random, kind: str) -> dict[str, Any]:
    if kind == "add":
        return {"scale": rng.choice([-1.5, 0.5, 1.0])}
    if kind == "norm_match":
        return {"scale": rng.choice([-0.6, 0.4]), "norm_match": True}
    if kind == "orthogonal":
        return {"coeff": rng.choice([0.0, 0.4, -1.0, 2.5])}
    if kind == "cap":
        low, high = rng.choice([(-0.05, 0.02), (None, -1.0), (0.5, None), (1.5, 1.5)])
        return {"low": low, "high": high}
    return {}


def _read(
    dice: Dice, name: str, site: str, *, family: Family, prompt: tuple[int, ...], tokens: int
) -> Read:
    rng = dice.choices
    reduce, form = rng.choice(REDUCTIONS), rng.choice(FORMS)
    width = family.z_width if site == "z" else family.width
    return Read(
        name=name,
        site=site,
        layers=tuple(sorted(rng.sample(range(family.layers), rng.randrange(1, family.layers + 1)))),
        at=at_for(dice, form, prompt, tokens),
        before=rng.random() < 0.4,
        reduce=reduce,
        directions=dice.matrix(rng.randrange(1, 5), width) if reduce == "project" else None,
        unit=rng.random() < 0.5,
        form=form,
    )
