"""How a study is shown: a table in the terminal, a CSV file, a plot."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Result(Protocol):
    """What a study has to offer to be shown."""

    @property
    def prompts(self) -> list[str]:
        """Give the prompts."""

    @property
    def texts(self) -> dict[float, list[str]]:
        """Give the texts by strength, one a prompt."""

    @property
    def scores(self) -> dict[float, list[float]]:
        """Give the scores by strength, one a prompt."""


def print_table(result: Result, strengths: Sequence[float]) -> None:
    """Print prompt and texts side by side, weakest strength first."""
    table = Table(show_lines=True)
    for title in ("prompt", *(f"{strength:+g}" for strength in strengths)):
        table.add_column(title, ratio=1, overflow="fold")
    for number, prompt in enumerate(result.prompts):
        cells = [prompt, *(result.texts[strength][number] for strength in strengths)]
        table.add_row(*(Text(" ".join(cell.split())) for cell in cells))
    Console(width=140).print(table)


def save_texts(result: Result, strengths: Sequence[float], path: Path) -> None:
    """Write one line a prompt and strength: prompt, strength, score, text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "strength", "score", "text"])
        for number, prompt in enumerate(result.prompts):
            for strength in strengths:
                score = f"{result.scores[strength][number]:.4f}"
                writer.writerow([prompt, strength, score, result.texts[strength][number]])


def save_plot(result: Result, strengths: Sequence[float], path: Path) -> None:
    """Plot each prompt's score against the strength, and the mean over prompts."""
    plt = _plotting()
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for number in range(len(result.prompts)):
        line = [result.scores[strength][number] for strength in strengths]
        axes.plot(strengths, line, color="0.8", linewidth=1)
    means = [sum(result.scores[s]) / len(result.scores[s]) for s in strengths]
    axes.plot(strengths, means, marker="o", color="tab:blue", linewidth=2, label="mean")
    axes.set_xticks(list(strengths))
    axes.set_xlabel("strength, in typical norms of the residual stream")
    axes.set_ylabel("log p(great) - log p(terrible)")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


@dataclass(frozen=True)
class Grid:
    """Numbers by Layer and position: `values[row][column]`, and what they are."""

    rows: list[str]
    columns: list[str]
    values: list[list[float]]
    label: str


def print_grid(grid: Grid) -> None:
    """Print the numbers, the largest of each Layer in bold."""
    table = Table(title=grid.label, title_justify="left")
    for title in ("Layer", *grid.columns):
        table.add_column(Text(title), justify="right")
    for name, values in zip(grid.rows, grid.values, strict=True):
        largest = max(values)
        cells = (Text(f"{v:+.2f}", style="bold" if v == largest else "") for v in values)
        table.add_row(name, *cells)
    Console(width=140).print(table)


def save_grid(grid: Grid, path: Path) -> None:
    """Write one line a Layer: its number, then a column for each position."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["layer", *grid.columns])
        for name, values in zip(grid.rows, grid.values, strict=True):
            writer.writerow([name, *(f"{value:.6f}" for value in values)])


def save_heat_map(grid: Grid, path: Path) -> None:
    """Plot the numbers as colours, Layer 0 at the bottom, 0 in white."""
    plt = _plotting()
    size = (2 + 0.7 * len(grid.columns), 2 + 0.2 * len(grid.rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    reach = max(1.0, *(abs(value) for values in grid.values for value in values))
    image = axes.imshow(
        grid.values, origin="lower", aspect="auto", cmap="RdBu", vmin=-reach, vmax=reach
    )
    # `$` would begin a formula.
    label, *names = (name.replace("$", r"\$") for name in (grid.label, *grid.columns))
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    step = max(1, len(grid.rows) // 10)
    axes.set_yticks(range(0, len(grid.rows), step), grid.rows[::step])
    axes.set_xlabel("position")
    axes.set_ylabel("Layer")
    figure.colorbar(image, ax=axes, label=label)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plotting() -> Any:
    """Load matplotlib with a backend that needs no display."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
