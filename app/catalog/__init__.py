"""Which models are served, what each can do, and how its text becomes token ids."""

from app.catalog.catalog import Catalog, load_catalog
from app.catalog.models_file import CatalogError
from app.catalog.served import ServedModel
from app.catalog.tokenizer import Tokenizer, Tokens, TooMany

__all__ = [
    "Catalog",
    "CatalogError",
    "ServedModel",
    "Tokenizer",
    "Tokens",
    "TooMany",
    "load_catalog",
]
