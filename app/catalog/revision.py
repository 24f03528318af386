"""Names a model's weights by what is in them, so that a Job can pin them.

The revision is a digest over the weights and the tokenizer (token ids mean nothing without it).
Hashing gigabytes at each start is too slow, so every file's sum is recorded with its size, and
for files that other programs may change also with its time: in checksums.json inside a folder
that Tiller made, in `checksums/` beside models.toml for any other folder.
"""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from app.catalog.models_file import CatalogError

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"
_PATTERNS = ("*.safetensors", "tokenizer.json")


def weights_revision(folder: Path, *, records: Path) -> str:
    """Name the content of `folder`: "sha256:" and 64 hexadecimal digits.

    `records` is the folder that may keep sums of folders that are not ours to write in. Raises
    CatalogError when there are no safetensors weights.
    """
    files = sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        msg = f"{folder} holds no *.safetensors file; convert the weights to safetensors first."
        raise CatalogError(msg)
    sums = _recorded(folder / CHECKSUMS, files, with_time=False)
    if sums is None:
        record = records / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"
        sums = _recorded(record, files, with_time=True)
        if sums is None:
            sums = {file.name: sha256_of(file) for file in files}
            _record(record, folder, files, sums)
    lines = "".join(f"{sums[file.name]}  {file.name}\n" for file in files)
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def sha256_of(file: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Record size and sum of every file of a folder that Tiller just made, and sync it."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != CHECKSUMS)
    content = {
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files
        }
    }
    with (folder / CHECKSUMS).open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def is_complete(folder: Path) -> bool:
    """Tell whether every file that `write_checksums` recorded is there with its size."""
    try:
        files = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == file["bytes"] for name, file in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def changed_files(folder: Path) -> list[str]:
    """List the files whose content is not what `write_checksums` recorded (reads them all)."""
    files = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))["files"]
    return [
        name
        for name, file in files.items()
        if not (folder / name).is_file() or sha256_of(folder / name) != file["sha256"]
    ]


def _recorded(record: Path, files: list[Path], *, with_time: bool) -> dict[str, str] | None:
    try:
        known: dict[str, dict[str, Any]] = json.loads(record.read_text(encoding="utf-8"))["files"]
        for file in files:
            stat, entry = file.stat(), known[file.name]
            if stat.st_size != entry["bytes"]:
                return None
            if with_time and stat.st_mtime_ns != entry["mtime_ns"]:
                return None
        return {file.name: known[file.name]["sha256"] for file in files}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record(record: Path, folder: Path, files: list[Path], sums: dict[str, str]) -> None:
    entries = {
        file.name: {
            "bytes": file.stat().st_size,
            "mtime_ns": file.stat().st_mtime_ns,
            "sha256": sums[file.name],
        }
        for file in files
    }
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        draft = record.with_name(f".{record.name}.{os.getpid()}")
        content = {"folder": str(folder), "files": entries}
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
        draft.replace(record)
    except OSError as error:
        # A read-only disk costs a hash at every start, nothing else.
        log.warning("sums of weights not recorded", extra={"error": str(error)})
