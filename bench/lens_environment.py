"""vllm-lens in an environment of its own: it patches every vLLM process it is installed beside.

The environment sees the packages of the present one (vLLM and torch are the very same files) and
has vllm-lens besides, without its dependencies: those it needs come with vLLM. It asks for
Python 3.12 and vLLM 0.30, runs on ours, and is told so.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

from worker.models.settings import load_fetch_settings

VERSION = "1.3.0"
PIP_SECONDS_MAX = 600


class LensUnavailableError(Exception):
    """vllm-lens could not be installed; the message says what pip said."""


def lens_python() -> Path:
    """Give the interpreter of the environment, made when it is missing.

    Raises LensUnavailableError when pip cannot get the package.
    """
    folder = load_fetch_settings().cache_dir / "bench" / f"vllm-lens-{VERSION}"
    python = folder / "bin" / "python"
    if not _has_lens(python):
        _make(folder, python)
    return python


def _has_lens(python: Path) -> bool:
    if not python.exists():
        return False
    code = "import importlib.metadata as m, vllm; print(m.version('vllm-lens'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip().endswith(VERSION)


def _make(folder: Path, python: Path) -> None:
    packages = sysconfig.get_paths()["purelib"]
    link = f"import site; site.addsitedir({packages!r})\n"
    inside = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    install += ["--no-deps", "--ignore-requires-python", f"vllm-lens=={VERSION}"]
    try:
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
        (Path(inside) / "present_environment.pth").write_text(link, encoding="utf-8")
        _run(install)
    except (subprocess.SubprocessError, OSError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        msg = f"vllm-lens {VERSION} could not be installed: {said[-1] if said else error!r}"
        raise LensUnavailableError(msg) from error
    if not _has_lens(python):
        msg = f"vllm-lens {VERSION} was installed into {folder}, but does not import there"
        raise LensUnavailableError(msg)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_SECONDS_MAX)
