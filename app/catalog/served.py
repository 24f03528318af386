"""What the service knows of one model, read from its folder; no weights are loaded.

A ServedModel never changes while a process runs, so it may be kept beside a request for as long
as that lives.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.catalog.architectures import ARCHITECTURES
from app.catalog.models_file import CatalogError, ModelEntry
from app.catalog.revision import weights_revision
from app.steering.spec import Site


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as requests are checked against it.

    `max_model_len` is the context in tokens, prompt and completion together. `special_token_ids`
    are ascending: BOS, EOS and every marker that the tokenizer calls special. `sites` is empty
    for an architecture that cannot be steered. `revision` names the weights and the tokenizer.
    From `mode` on the fields say how a worker sets its engine up; `threads` None leaves the
    number to the engine.
    """

    name: str
    path: Path
    tokenizer_path: Path
    revision: str
    dtype: str
    architecture: str
    hidden_size: int
    n_layers: int
    n_heads: int
    head_dim: int
    sites: tuple[Site, ...]
    vocab_size: int
    max_model_len: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    listed: bool
    mode: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    threads: int | None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def site_width(self, site: Site) -> int:
        """Say how many numbers a row of a site has."""
        return self.n_heads * self.head_dim if site is Site.z else self.hidden_size

    def describe_sites(self) -> dict[str, dict[str, int]]:
        """Say where interventions write and captures read, and how wide each place is."""
        described = {site.value: {"width": self.site_width(site)} for site in self.sites}
        if Site.z in self.sites:
            described[Site.z.value]["heads"] = self.n_heads
        return described


def read_served_model(name: str, entry: ModelEntry, *, beside: Path) -> ServedModel:
    """Read what `entry` promises from its folder; paths are relative to `beside`.

    Raises CatalogError when a file is missing or the entry asks for more than the model has.
    """
    folder, tokenizer_folder = _folders(name, entry, beside)
    config = _read_json(folder / "config.json")
    # Multimodal checkpoints keep the sizes of their language model one level down.
    text = config.get("text_config") or config
    context = _number(folder, text, "max_position_embeddings", "n_positions", "n_ctx", "seq_length")
    if (entry.max_model_len or 0) > context:
        msg = f"Model {name!r}: max_model_len {entry.max_model_len} is over the model's {context}."
        raise CatalogError(msg)
    architecture = str((config.get("architectures") or ["unknown"])[0])
    known = ARCHITECTURES.get(architecture)
    hidden = _number(folder, text, "hidden_size", "n_embd", "d_model")
    heads = _number(folder, text, "num_attention_heads", "n_head", "num_heads")
    bos, eos, special = _token_ids(folder, tokenizer_folder, text)
    revision = entry.revision or weights_revision(folder, records=beside / "checksums")
    return ServedModel(
        name=name,
        path=folder,
        tokenizer_path=tokenizer_folder,
        revision=revision,
        dtype=entry.dtype,
        architecture=architecture,
        hidden_size=hidden,
        n_layers=_number(folder, text, "num_hidden_layers", "n_layer", "num_layers"),
        n_heads=heads,
        head_dim=text.get("head_dim") or hidden // heads,
        sites=tuple(
            site
            for site in (() if known is None else known.sites(text))
            # Heads spread over ranks are not served: see docs/decisions/0011-pipeline-parallel.md.
            if not (site is Site.z and entry.tensor_parallel_size > 1)
        ),
        vocab_size=_number(folder, text, "vocab_size"),
        max_model_len=entry.max_model_len or context,
        bos_id=bos,
        eos_ids=eos,
        special_token_ids=special,
        listed=entry.listed,
        mode=entry.mode,
        max_num_seqs=entry.max_num_seqs,
        max_num_batched_tokens=entry.max_num_batched_tokens,
        kv_cache_bytes=entry.kv_cache_bytes,
        threads=entry.threads,
        tensor_parallel_size=entry.tensor_parallel_size,
        pipeline_parallel_size=entry.pipeline_parallel_size,
    )


def _folders(name: str, entry: ModelEntry, beside: Path) -> tuple[Path, Path]:
    if entry.path is None:
        how = f" --hub {entry.hub}" if entry.hub else ""
        msg = f"Model {name!r} has no folder yet; run `tiller models add {name}{how}` to fetch it."
        raise CatalogError(msg)
    folder = (beside / entry.path).resolve()
    if not folder.is_dir():
        msg = f"Model {name!r}: the folder {folder} does not exist; correct `path` in models.toml."
        raise CatalogError(msg)
    return folder, (beside / (entry.tokenizer or entry.path)).resolve()


def _token_ids(
    folder: Path, tokenizer_folder: Path, config: dict[str, Any]
) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    """Find BOS, end tokens and all special tokens, as transformers would."""
    added = _read_json(tokenizer_folder / "tokenizer.json").get("added_tokens") or []
    by_text = {token["content"]: int(token["id"]) for token in added}
    names = _read_json(tokenizer_folder / "tokenizer_config.json", missing_ok=True)
    generation = _read_json(folder / "generation_config.json", missing_ok=True)
    bos_token = names.get("bos_token")
    bos_text = bos_token.get("content") if isinstance(bos_token, dict) else bos_token
    bos = by_text.get(bos_text) if bos_text else _first(config.get("bos_token_id"))
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    eos = tuple(ends) if isinstance(ends, list) else (() if ends is None else (int(ends),))
    special = {int(token["id"]) for token in added if token.get("special")}
    if bos is not None:
        special.add(bos)
    return bos, eos, tuple(sorted(special | set(eos)))


def _first(value: object) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) else None


def _number(folder: Path, config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        if isinstance(value := config.get(key), int) and value > 0:
            return value
    msg = f"{folder / 'config.json'} says nothing about {keys[0]}; this model cannot be served."
    raise CatalogError(msg)


def _read_json(file: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        msg = f"{file} is missing; a model's folder needs config.json and tokenizer.json."
        raise CatalogError(msg) from error
    except ValueError as error:
        msg = f"{file} is not valid JSON: {error}"
        raise CatalogError(msg) from error
    if not isinstance(content, dict):
        msg = f"{file} must hold a JSON object."
        raise CatalogError(msg)
    return content
