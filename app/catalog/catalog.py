"""The served models of this installation: lookup by name, and their tokenizers.

Read once at start from models.toml; a change needs a restart of the process, because Jobs pin
what was read here.
"""

import threading
from collections.abc import Iterable
from pathlib import Path

from app.catalog.models_file import CatalogError, read_models_file
from app.catalog.served import ServedModel, read_served_model
from app.catalog.tokenizer import Tokenizer
from app.errors import ModelNotFoundError

NAMES_SHOWN_MAX = 20


class Catalog:
    """Served models by name; tokenizers load on first use, once."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """Keep `models` in their order."""
        self._models = {model.name: model for model in models}
        self._tokenizers: dict[Path, Tokenizer] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> ServedModel:
        """Find a model, listed or not. Raises ModelNotFoundError naming those that are listed."""
        model = self._models.get(name)
        if model is None:
            names = [model.name for model in self.listed()]
            shown = ", ".join(names[:NAMES_SHOWN_MAX]) + (", …" if names[NAMES_SHOWN_MAX:] else "")
            msg = f"There is no model {name[:200]!r}; served are: {shown or 'none'}."
            raise ModelNotFoundError(msg, param="model")
        return model

    def __contains__(self, name: str) -> bool:
        """Tell whether this process knows a model."""
        return name in self._models

    def listed(self) -> list[ServedModel]:
        """List the models that GET /v1/models shows, in the order of models.toml."""
        return [model for model in self._models.values() if model.listed]

    def all(self) -> list[ServedModel]:
        """List every model, in the order of models.toml."""
        return list(self._models.values())

    def tokenizer(self, name: str) -> Tokenizer:
        """Give the tokenizer of a model. Raises ModelNotFoundError."""
        path = self.get(name).tokenizer_path
        with self._lock:
            if path not in self._tokenizers:
                self._tokenizers[path] = Tokenizer(path)
            return self._tokenizers[path]


def load_catalog(models_file: Path) -> Catalog:
    """Read models.toml and every folder it names. Raises CatalogError."""
    entries = read_models_file(models_file)
    if not entries:
        msg = f"{models_file} lists no model; `tiller models add NAME` adds one."
        raise CatalogError(msg)
    beside = models_file.resolve().parent
    return Catalog(read_served_model(name, entry, beside=beside) for name, entry in entries.items())
