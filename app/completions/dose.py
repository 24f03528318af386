"""Tells whether an added vector is longer than what it is added to typically is.

The dose of an add is |scale| x the norm of its row, of norm_match |scale| times the norm that it
meets. Beyond one typical norm of the residual stream at that layer, text falls apart sooner or
later, so the answer carries a warning; nothing is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from app.completions.spec import RequestSpec
from app.steering.spec import Intervention, Op, Site
from app.steering.vectors import Vector

DOSE: Final = "dose_above_typical_norm"
_REMEMBERED_MAX: Final = 4096


class Doses:
    """Compares the interventions of one model's requests with its typical norms."""

    def __init__(self, norms: Sequence[float] | None, *vectors: Mapping[str, Vector]) -> None:
        """Bind the norm at resid_post of every layer (None: not known), and where vectors are."""
        self._norms = norms
        self._vectors = vectors
        self._row_norms: dict[str, npt.NDArray[np.float64]] = {}
        # Keyed by identity, which is quick; each value keeps its tuple alive, so an id is never
        # used twice. Requests that share a list share the tuple.
        self._known: dict[int, tuple[tuple[Intervention, ...], bool]] = {}

    def warned(self, spec: RequestSpec) -> RequestSpec:
        """Add the warning to a request in which an intervention adds more than a typical norm."""
        if not spec.interventions or not self._is_any_above(spec.interventions):
            return spec
        return replace(spec, warnings=(*spec.warnings, DOSE))

    def _is_any_above(self, interventions: tuple[Intervention, ...]) -> bool:
        known = self._known.get(id(interventions))
        if known is None:
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            known = (interventions, any(map(self._is_above, interventions)))
            self._known[id(interventions)] = known
        return known[1]

    def _is_above(self, item: Intervention) -> bool:
        if item.op is not Op.add or item.changes_nothing:
            return False
        if item.norm_match:
            # Relative to the row itself, so nothing needs to be known.
            return item.site in _RESIDUAL and abs(item.scale) > 1
        typical = self._typical(item.site, item.layer)
        if typical is None:
            return False
        rows = self._norms_of(item.vector)
        count = len(item.positions) if item.positions is not None else 1
        longest = float(rows[item.row : item.row + count].max(initial=0.0))
        return abs(item.scale) * longest > typical

    def _typical(self, site: Site, layer: int) -> float | None:
        """Give the norm to compare with: what enters a layer has left the one before."""
        if self._norms is None or site not in _RESIDUAL:
            return None
        place = layer - 1 if site is Site.resid_pre else layer
        return self._norms[place] if 0 <= place < len(self._norms) else None

    def _norms_of(self, name: str) -> npt.NDArray[np.float64]:
        norms = self._row_norms.get(name)
        if norms is None:
            vector = next(known[name] for known in self._vectors if name in known)
            rows = vector.to_float32().reshape(-1, vector.shape[-1]).astype(np.float64)
            norms = self._row_norms[name] = np.linalg.norm(rows, axis=1)
        return norms


_RESIDUAL: Final = frozenset({Site.resid_pre, Site.resid_mid, Site.resid_post})
