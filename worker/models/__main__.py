"""`python -m worker.models add …`, what `tiller models add` runs."""

import argparse
import sys
import time
from pathlib import Path

from app.catalog import CatalogError
from app.catalog.models_file import read_models_file
from worker.models import add
from worker.models.fetch import WHEEL_MODELS, FetchError
from worker.models.settings import load_fetch_settings


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status (0 done, 1 could not, 2 wrong arguments)."""
    options = _parser().parse_args(arguments)
    name: str = options.name
    if name not in WHEEL_MODELS and not options.path and not options.hub:
        known = ", ".join(WHEEL_MODELS)
        sys.stderr.write(
            f"{name!r} is not a model that Tiller knows ({known}); say where it is with "
            "--path FOLDER or --hub ID.\n"
        )
        return 2
    started = time.monotonic()
    try:
        folder = _add(name, options)
        kept = _kept(name, options)
    except (CatalogError, FetchError, OSError) as error:
        sys.stderr.write(f"{name} was not added: {error}\n")
        return 1
    seconds = time.monotonic() - started
    if kept:
        sys.stderr.write(
            f"{name} was listed before and stays as it was: {kept}. "
            f"Edit {options.data_dir.resolve() / add.MODELS_FILE} to change that.\n"
        )
        return 1
    sys.stdout.write(f"{name} is ready in {folder} ({seconds:.1f} s)\n")
    return 0


def _kept(name: str, options: argparse.Namespace) -> str:
    """Say what was asked for and is not so, because the model had been listed before."""
    entry = read_models_file(options.data_dir.resolve() / add.MODELS_FILE)[name]
    asked = {"mode": options.mode, "dtype": options.dtype}
    return ", ".join(
        f"{key} is {getattr(entry, key)}, not {value}"
        for key, value in asked.items()
        if value is not None and value != getattr(entry, key)
    )


def _add(name: str, options: argparse.Namespace) -> Path:
    data_dir: Path = options.data_dir.resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    said = {"dtype": options.dtype, "mode": options.mode}
    if options.path:
        return add.add_folder(name, data_dir, options.path, **said)
    if options.hub:
        return add.add_hub_model(name, data_dir, options.hub, revision=options.revision, **said)
    cache, mode = load_fetch_settings().cache_dir.resolve(), options.mode or "eager"
    return add.add_wheel_model(name, data_dir, cache=cache, offline=options.offline, mode=mode)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tiller models")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("add", help="fetch or name a model and list it in models.toml")
    command.add_argument("name", help="how requests call the model, e.g. smollm2-135m")
    command.add_argument("--data-dir", type=Path, default=Path("data"), help="default: ./data")
    source = command.add_mutually_exclusive_group()
    source.add_argument("--path", type=Path, help="a folder with config.json and safetensors")
    source.add_argument("--hub", help="a model hub id, fetched once")
    command.add_argument("--revision", help="commit, tag or branch of --hub")
    command.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as stored")
    command.add_argument(
        "--mode",
        choices=("eager", "compiled"),
        help="default: compiled on CPUs with a C++ compiler, but eager for the known small models",
    )
    command.add_argument("--offline", action="store_true", help="use cached files only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
