"""models.toml: one table a served model, read strictly and written by adding text.

    [models.smollm2-135m]
    path = "models/smollm2-135m"    # a folder, absolute or beside this file
    dtype = "bfloat16"

An unknown key is refused by name: a misspelt limit that is silently ignored would be found out
on the wrong day. A person's comments and order survive, because entries are only ever appended.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Names end up in URLs, in queue names and in folder names. A slash is allowed because hub ids
# are the names that people know; it never becomes part of a path (entries say their path).
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*(/[A-Za-z0-9][A-Za-z0-9._\-]*)?")
NAME_CHARS_MAX = 96

Count = Annotated[int, Field(ge=1)]


class CatalogError(Exception):
    """models.toml or a model's folder cannot be used; the message says what to change."""


class ModelEntry(BaseModel):
    """One table of models.toml, as written there."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str | None = Field(None, description="Folder with config.json, weights and tokenizer.")
    hub: str | None = Field(None, description="Hub id that the folder was fetched from.")
    revision: str | None = Field(None, description="Names the weights; default is their checksum.")
    tokenizer: str | None = Field(None, description="Folder of tokenizer.json, when not `path`.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Numbers of the forward pass."
    )
    max_model_len: Count | None = Field(
        None, description="Context in tokens; default is the model's."
    )
    listed: bool = Field(default=True, description="Shown by GET /v1/models; Jobs need it.")
    mode: Literal["eager", "compiled"] = Field(
        "eager", description="How the engine runs the model."
    )
    max_num_seqs: Count = Field(64, description="Most requests in one batch.")
    max_num_batched_tokens: Count = Field(2048, description="Most tokens in one pass.")
    kv_cache_bytes: Count = Field(1024**3, description="Memory for keys and values, in bytes.")
    threads: Count | None = Field(None, description="CPU threads of the engine; default all.")
    tensor_parallel_size: Count = Field(
        1, description="Processes that share each layer; above 1 site z is not served."
    )
    pipeline_parallel_size: Count = Field(
        1, description="Processes that the layers are dealt out to; on CPUs only."
    )


def check_name(name: str) -> str:
    """Give `name` back when a model may be called so. Raises CatalogError otherwise."""
    if len(name) > NAME_CHARS_MAX or _NAME.fullmatch(name) is None:
        msg = (
            f"{name!r} cannot be a model's name: use letters, digits, '.', '_', '-' and at most "
            f"one '/', {NAME_CHARS_MAX} characters in all."
        )
        raise CatalogError(msg)
    return name


def read_models_file(file: Path) -> dict[str, ModelEntry]:
    """Read every entry in the order of the file. Raises CatalogError naming file, table, key."""
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"{file} does not exist; `tiller models add NAME` makes it."
        raise CatalogError(msg) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{file} is not valid TOML: {error}"
        raise CatalogError(msg) from error
    models = tables.pop("models", {})
    if tables or not isinstance(models, dict):
        msg = f"{file} may hold tables [models.NAME] only, not {sorted(tables) or 'models = ...'}."
        raise CatalogError(msg)
    return {check_name(name): _entry(file, name, table) for name, table in models.items()}


def add_model(file: Path, name: str, entry: ModelEntry) -> bool:
    """Append an entry; False when the file already has one of this name for the same model.

    Raises CatalogError when the name is taken by another model.
    """
    known = read_models_file(file) if file.exists() else {}
    if (old := known.get(check_name(name))) is not None:
        same = _folder(file, old.path) == _folder(file, entry.path) and old.hub == entry.hub
        if not same:
            msg = (
                f"{file} already has a model {name!r} (path {old.path!r}, hub {old.hub!r}); "
                "choose another name or remove that table first."
            )
            raise CatalogError(msg)
        return False
    text = file.read_text(encoding="utf-8").rstrip("\n") + "\n\n" if known else ""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text + _table(name, entry), encoding="utf-8")
    draft.replace(file)
    return True


def _entry(file: Path, name: str, table: object) -> ModelEntry:
    try:
        return ModelEntry.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the table"
        msg = f"{file}, [models.{name}], {key}: {first['msg']} (sent: {first['input']!r})."
        raise CatalogError(msg) from error


def _folder(file: Path, path: str | None) -> Path | None:
    return None if path is None else (file.parent / path).resolve()


def _table(name: str, entry: ModelEntry) -> str:
    values: Mapping[str, object] = entry.model_dump(exclude_unset=True, exclude_none=True)
    lines = [f"{key} = {_literal(value)}" for key, value in values.items()]
    return "\n".join([f"[models.{_literal(name)}]", *lines, ""])


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
