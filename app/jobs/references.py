"""What the requests of an order refer to (see app.completions.references)."""

from collections.abc import Iterator
from typing import Any

from app.completions import references
from app.completions.rows_of import RowsOf
from app.jobs.schemas import JobOrder
from app.settings import Limits


def named_vectors(order: JobOrder, limits: Limits) -> set[str]:
    """Collect the names of stored vectors that an order uses."""
    return references.named_vectors(_bodies(order), limits)


def wanted_rows(order: JobOrder, limits: Limits) -> set[RowsOf]:
    """Collect the captured rows that an order copies."""
    return references.wanted_rows(_bodies(order), limits)


def _bodies(order: JobOrder) -> Iterator[dict[str, Any]]:
    yield order.defaults
    for sent in order.requests:
        if isinstance(sent, dict):
            body = sent.get("body", sent)
            if isinstance(body, dict):
                yield body
