"""What parity is shown over: op, site, form of `at`, family and condition, and how to cover it.

`pairwise` picks few combinations that hold every pair of values of two dimensions, `once_each`
adds what op, site and form make together; `everything` is the full matrix.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tests.models.families import FAMILIES

OPS: Final = ("add", "norm_match", "orthogonal", "cap", "replace", "summed")
SITES: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z")
FORMS: Final = ("all", "positions", "spans", "prompt", "generated", "last", "steps", "exclude")
CONDITIONS: Final = ("alone", "batch", "cached", "chunked", "preempted", "compiled")
# Attention and MLP of a parallel block start from the same stream: it has no middle.
WITHOUT_MID: Final = frozenset({"gpt_neox"})


class Combination(NamedTuple):
    """One value of each dimension."""

    op: str
    site: str
    form: str
    family: str
    condition: str


def everything() -> Iterator[Combination]:
    """Give the full matrix, as far as the families have the sites."""
    for values in itertools.product(OPS, SITES, FORMS, FAMILIES, CONDITIONS):
        combination = Combination(*values)
        if _exists(combination):
            yield combination


def pairs_of(combination: Combination) -> set[tuple[tuple[int, str], ...]]:
    """List the pairs of values that a combination holds."""
    return set(itertools.combinations(enumerate(combination), 2))


def pairwise(seed: int = 0, *, tries: int = 40) -> list[Combination]:
    """Pick combinations that hold every pair: greedily, the best of some with a missing pair."""
    rng = random.Random(seed)
    matrix = list(everything())
    missing = set().union(*map(pairs_of, matrix))
    by_pair: dict[tuple[tuple[int, str], ...], list[Combination]] = {}
    for combination in matrix:
        for pair in pairs_of(combination):
            by_pair.setdefault(pair, []).append(combination)
    chosen = []
    while missing:
        # Sorted, since a set's order changes from run to run.
        pair = min(missing)
        some = rng.sample(by_pair[pair], min(tries, len(by_pair[pair])))
        best = max(some, key=lambda combination: len(pairs_of(combination) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


def once_each() -> Iterator[Combination]:
    """Give every op, site and form together once, in batches, with one family after the other."""
    families = itertools.cycle(FAMILIES)
    for op, site, form in itertools.product(OPS, SITES, FORMS):
        combination = Combination(op, site, form, next(families), "batch")
        while not _exists(combination):
            combination = combination._replace(family=next(families))
        yield combination


def group(
    combinations: Sequence[Combination],
) -> dict[tuple[str, str], list[Combination]]:
    """Sort combinations by family and condition, which share an engine."""
    groups: dict[tuple[str, str], list[Combination]] = {}
    for combination in combinations:
        groups.setdefault((combination.family, combination.condition), []).append(combination)
    return groups


def _exists(combination: Combination) -> bool:
    return not (combination.site == "resid_mid" and combination.family in WITHOUT_MID)
