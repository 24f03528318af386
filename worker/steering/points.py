"""Points: the places of a forward pass where the core works, one for each site of each layer.

A point's number is fixed by site and layer alone, so that hooks, programs and plans agree on it
without a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from app.steering.spec import Site

_ORDER = {site: index for index, site in enumerate(Site)}


@dataclass(frozen=True, slots=True)
class Shape:
    """The model as the core sees it: `widths` of the sites it has, heads of site z.

    Layers are counted over the whole model. `here` are those that run on this rank, None for all:
    a rank of a pipeline has some of them, and hooks at those alone.
    """

    n_layers: int
    widths: Mapping[Site, int]
    n_heads: int
    dtype: torch.dtype
    device: torch.device
    here: range | None = None

    def point(self, site: Site, layer: int) -> int:
        """Return the number of a point; raise ValueError when the model does not have it."""
        if site not in self.widths:
            msg = f"the model has no {site.value}; it has {', '.join(self.widths)}"
            raise ValueError(msg)
        if not 0 <= layer < self.n_layers:
            msg = f"there is no Layer {layer}: the model has {self.n_layers}"
            raise ValueError(msg)
        return _ORDER[site] * self.n_layers + layer

    def runs(self, layer: int) -> bool:
        """Say whether a layer runs on this rank."""
        return self.here is None or layer in self.here

    def width_at(self, point: int) -> int:
        """Return how many numbers a row has at a point."""
        return self.widths[tuple(Site)[point // self.n_layers]]
