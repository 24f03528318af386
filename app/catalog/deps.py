"""How endpoints get the catalog that the application loaded at start."""

from typing import Annotated

from fastapi import Depends, Request

from app.catalog.catalog import Catalog


def _catalog(request: Request) -> Catalog:
    catalog: Catalog = request.app.state.catalog
    return catalog


CatalogDep = Annotated[Catalog, Depends(_catalog)]
