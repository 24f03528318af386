"""Where each file lies in a Job's folder. Paths are relative to it, as the manifest lists them.

A part's files carry the lease token: whatever a second attempt writes, it overwrites nothing.
Names sort by first index, so readers that sort by name read in order.
"""

from typing import Final

from app.results.schema import RESIDUAL_STREAM

MANIFEST: Final = "manifest.json"
CHECKSUMS: Final = "SHA256SUMS"
STATS: Final = "stats.parquet"


def _part(first_index: int, lease_token: int) -> str:
    return f"part-{first_index:07d}.{lease_token}.parquet"


def results_path(first_index: int, lease_token: int) -> str:
    """Name a part's file of texts."""
    return f"results/{_part(first_index, lease_token)}"


def capture_path(capture: str, layer: int, first_index: int, lease_token: int) -> str:
    """Name a part's file of one capture at one layer; `layer=L` is read as a column."""
    folder = "activations" if capture == RESIDUAL_STREAM else f"captures/{capture}"
    return f"{folder}/layer={layer}/{_part(first_index, lease_token)}"


def moments_path(first_index: int, lease_token: int) -> str:
    """Name a part's file of running statistics; the manifest does not list it."""
    return f"moments/{_part(first_index, lease_token)}"
