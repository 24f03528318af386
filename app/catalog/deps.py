"""How endpoints get the catalog and the typical norms that the application opened at start."""

from typing import Annotated

from fastapi import Depends, Request

from app.catalog.catalog import Catalog
from app.catalog.norms import TypicalNorms


def _catalog(request: Request) -> Catalog:
    catalog: Catalog = request.app.state.catalog
    return catalog


CatalogDep = Annotated[Catalog, Depends(_catalog)]


def _norms(request: Request) -> TypicalNorms:
    norms: TypicalNorms = request.app.state.norms
    return norms


NormsDep = Annotated[TypicalNorms, Depends(_norms)]
