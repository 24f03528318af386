"""Activation patching in two Jobs: where in the model does one word decide the answer?

    Job 1   run a clean and a corrupted prompt; capture every layer of the clean run
    Job 2   run the corrupted prompt once for every Layer and position, with the clean row of that
            place written over it (`replace` `from` Job 1)

Each cell of the heat map says how much of the clean prompt's preference for the right answer over
the wrong one comes back: 0 is the corrupted run, 1 the clean one. An answer is scored as the
prompt's last token, so its log-probability is there however unlikely it became.

Run it with `make patching`; `python -m examples.patching --help` lists prompts and answers.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.dataset as ds

from examples.report import Grid, print_grid, save_grid, save_heat_map
from examples.sentiment import closing_line, last_logprob
from tiller.client import Client
from tiller.local_stack import running_stack
from tiller.progress import follow
from tiller.results import list_captures

MODEL = "smollm2-135m"
SCORED = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
ANSWERS = ("right", "wrong")

Array = npt.NDArray[np.float64]
Row = dict[str, Any]


class UnequalPromptsError(Exception):
    """The prompts or answers cannot be compared position by position; the message says why."""


@dataclass(frozen=True)
class Contrast:
    """Two prompts of as many tokens, and the answers, one token each, that follow them."""

    clean: str = "The capital of France is the city of"
    corrupted: str = "The capital of Italy is the city of"
    right: str = " Paris"
    wrong: str = " Rome"

    def scored(self, prompt: str, answer: str) -> str:
        """Give the text of a prompt ("clean", "corrupted") with an answer ("right", "wrong")."""
        return str(getattr(self, prompt) + getattr(self, answer))


@dataclass(frozen=True)
class Places:
    """What Job 1 told: the tokens of both prompts, the corrupted one as ids, the layers."""

    clean_tokens: list[str]
    corrupted_tokens: list[str]
    scored_ids: dict[str, list[int]]  # by answer: the corrupted prompt and that answer
    layers: list[int]

    def cells(self) -> list[tuple[int, int]]:
        """List every (layer, position)."""
        positions = range(len(self.corrupted_tokens))
        return [(layer, position) for layer in self.layers for position in positions]


@dataclass(frozen=True)
class HeatMap:
    """log p(right) - log p(wrong): of both runs, and of each patched one, [layers, positions]."""

    clean: float
    corrupted: float
    patched: Array

    @property
    def recovered(self) -> Array:
        """Give the share of the clean run's preference that each patch brings back."""
        return (self.patched - self.corrupted) / (self.clean - self.corrupted)


def run_job(
    client: Client, model: str, title: str, folder: Path, requests: Sequence[Row]
) -> dict[str, Any]:
    """Submit a Job, show its progress, download its files; return the finished Job."""
    created = client.create_job(
        model=model, name=title, requests=requests, defaults={"max_tokens": 1, "temperature": 0}
    )
    finished = follow(client, created["id"], title)
    client.download(finished["id"], folder)
    return finished


def capture_requests(contrast: Contrast) -> list[Row]:
    """Make the requests of Job 1: the clean prompt read at all layers, and both runs' scores."""
    scores = [
        {"custom_id": f"{prompt}-{answer}", "prompt": contrast.scored(prompt, answer), **SCORED}
        for prompt in ("clean", "corrupted")
        for answer in ANSWERS
    ]
    clean = {"custom_id": "clean", "prompt": contrast.clean, "output_residual_stream": True}
    return [clean, *scores]


def patch_requests(source: str, places: Places) -> list[Row]:
    """Make the requests of Job 2: one a Layer, position and answer, patched from Job `source`."""
    return [
        {
            "custom_id": f"{layer}-{position}-{answer}",
            "prompt": places.scored_ids[answer],
            "interventions": [
                {
                    "op": "replace",
                    "layers": [layer],
                    "from": {
                        "job": source,
                        "custom_id": "clean",
                        "layer": layer,
                        "positions": [position],
                    },
                }
            ],
            **SCORED,
        }
        for layer, position in places.cells()
        for answer in ANSWERS
    ]


def read_rows(folder: Path) -> dict[str, Row]:
    """Read the results of a downloaded Job by custom_id."""
    columns = ["custom_id", "prompt", "prompt_token_ids", "prompt_logprobs"]
    table = ds.dataset(folder / "results").to_table(columns=columns)
    return {row["custom_id"]: row for row in table.to_pylist()}


def read_places(rows: dict[str, Row], folder: Path) -> Places:
    """Read tokens and layers of Job 1.

    Raises UnequalPromptsError unless both prompts have as many tokens and each answer is one.
    """
    clean = rows["clean"]["prompt_token_ids"]
    scored = {name: row["prompt_token_ids"] for name, row in rows.items() if name != "clean"}
    for name, ids in scored.items():
        if len(ids) != len(clean) + 1:
            msg = (
                f"The clean prompt has {len(clean)} tokens and {rows[name]['prompt']!r} has "
                f"{len(ids)} instead of one more. Choose prompts of as many tokens, and answers "
                "of one token each (most begin with a space)."
            )
            raise UnequalPromptsError(msg)
    if scored["clean-right"] == scored["clean-wrong"]:
        raise UnequalPromptsError("Both answers are the same token; choose two.")
    return Places(
        clean_tokens=_tokens(rows["clean-right"]),
        corrupted_tokens=_tokens(rows["corrupted-right"]),
        scored_ids={answer: scored[f"corrupted-{answer}"] for answer in ANSWERS},
        layers=list_captures(folder)["residual_stream"],
    )


def _tokens(row: Row) -> list[str]:
    """Give the texts of a scored prompt's tokens without the answer's.

    The first token has no log-probability and so no text of its own: it is what the others leave.
    """
    others = [entry[0]["token"] for entry in row["prompt_logprobs"][1:]]
    first: str = row["prompt"].removesuffix("".join(others))
    return [first if first != row["prompt"] else "", *others[:-1]]


def preference(rows: dict[str, Row], run: str) -> float:
    """Give log p(right) - log p(wrong) of a run."""
    return last_logprob(rows[f"{run}-right"]) - last_logprob(rows[f"{run}-wrong"])


def study(
    client: Client, model: str, contrast: Contrast, out: Path
) -> tuple[HeatMap, Places, list[dict[str, Any]]]:
    """Run both Jobs and read the heat map; `out` gets their files in capture/ and patch/."""
    first = run_job(client, model, "capture", out / "capture", capture_requests(contrast))
    runs = read_rows(out / "capture")
    places = read_places(runs, out / "capture")
    requests = patch_requests(first["id"], places)
    second = run_job(client, model, "patch", out / "patch", requests)
    patched = read_rows(out / "patch")
    values = [preference(patched, f"{layer}-{position}") for layer, position in places.cells()]
    heat_map = HeatMap(
        clean=preference(runs, "clean"),
        corrupted=preference(runs, "corrupted"),
        patched=np.reshape(values, (len(places.layers), len(places.corrupted_tokens))),
    )
    return heat_map, places, [first, second]


def show(heat_map: HeatMap, places: Places, contrast: Contrast, out: Path) -> None:
    """Print the heat map as a table; save it as a CSV file and as a plot."""
    pairs = zip(places.clean_tokens, places.corrupted_tokens, strict=True)
    columns = [
        f"{position} {corrupted.strip()}" + ("" if clean == corrupted else f" <- {clean.strip()}")
        for position, (clean, corrupted) in enumerate(pairs)
    ]
    grid = Grid(
        rows=[str(layer) for layer in places.layers],
        columns=columns,
        values=heat_map.recovered.tolist(),
        label=f"recovered of log p({contrast.right!r}) - log p({contrast.wrong!r})",
    )
    print_grid(grid)
    save_grid(grid, out / "patching.csv")
    save_heat_map(grid, out / "patching.png")


def main() -> int:
    """Read the command line, run the study on a service of its own, stop the service."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo/patching"), help="for the results")
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="the service's folder")
    for field, value in vars(Contrast()).items():
        parser.add_argument(f"--{field}", default=value, help=f"default: {value!r}")
    arguments = parser.parse_args()
    contrast = Contrast(arguments.clean, arguments.corrupted, arguments.right, arguments.wrong)
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    try:
        with (
            running_stack(arguments.data) as credentials,
            Client(credentials["api_base"], credentials["api_key"]) as client,
        ):
            heat_map, places, jobs = study(client, MODEL, contrast, arguments.out)
    except UnequalPromptsError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"log p({contrast.right!r}) - log p({contrast.wrong!r}): "
        f"clean {heat_map.clean:+.2f}, corrupted {heat_map.corrupted:+.2f}"
    )
    if heat_map.clean <= heat_map.corrupted:
        print("There is nothing to recover: choose other prompts or answers.", file=sys.stderr)
        return 1
    show(heat_map, places, contrast, arguments.out)
    print(closing_line(jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
