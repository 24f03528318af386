"""A sentiment study: derive a direction from contrasting prompts, steer with it, score the effect.

    Job 1   read Layer 22 on a dozen happy and a dozen sad prompts
    here    difference of the two groups' means, and the typical norm of the stream
    Job 2   one set of prompts at -0.5, 0 and +0.5 typical norms: a text, and the log-probability
            of " great" and of " terrible" as the next word

Run it with `make demo`; `make demo PROMPTS=file` takes other prompts, one a line.
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

from examples.report import print_table, save_plot, save_texts
from tiller.client import Client
from tiller.local_stack import running_stack
from tiller.progress import follow
from tiller.tensors import encode

MODEL = "smollm2-135m"
LAYER = 22  # of 30: late enough that the word's feeling is there, early enough to change the text
STRENGTHS = (-0.5, 0.0, 0.5)  # in typical norms
NAMES = {-0.5: "minus", 0.0: "zero", 0.5: "plus"}
MAX_TOKENS = 20
GOOD, BAD = " great", " terrible"
PROMPTS = Path(__file__).parent / "prompts"

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Direction:
    """A unit vector [hidden], the norm it had, and the typical norm of the stream there."""

    vector: Array
    raw_norm: float
    typical_norm: float


@dataclass(frozen=True)
class Study:
    """What came out: texts and scores by strength, one of each a prompt."""

    prompts: list[str]
    texts: dict[float, list[str]]
    scores: dict[float, list[float]]

    def mean_score(self, strength: float) -> float:
        """Give the mean over prompts of log p(great) - log p(terrible)."""
        return float(np.mean(self.scores[strength]))


def read_lines(path: Path) -> list[str]:
    """Read prompts, one a line; empty lines are left out."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_residuals(folder: Path, layer: int) -> dict[str, Array]:
    """Read the residual stream of a downloaded Job: custom_id -> [positions, hidden]."""
    table = ds.dataset(folder / "activations", partitioning="hive").to_table(
        filter=ds.field("layer") == layer
    )
    width = table.schema.field("residual").type.list_size
    rows = table["residual"].combine_chunks().flatten().to_numpy().reshape(-1, width)
    ids = np.asarray(table["custom_id"].to_pylist())
    order = np.asarray(table["position"].to_pylist())
    return {name: rows[ids == name][np.argsort(order[ids == name])] for name in dict.fromkeys(ids)}


def derive(happy: Sequence[Array], sad: Sequence[Array]) -> Direction:
    """Take the difference of means (mean a prompt over positions, then over prompts).

    The first position is left out: its norm is far larger than all others. The typical norm is
    the mean over prompts of each prompt's median norm.
    """

    def mean(group: Sequence[Array]) -> Array:
        means: Array = np.stack([rows[1:].mean(axis=0) for rows in group]).mean(axis=0)
        return means

    raw = mean(happy) - mean(sad)
    norms = [np.median(np.linalg.norm(rows[1:], axis=1)) for rows in (*happy, *sad)]
    norm = float(np.linalg.norm(raw))
    return Direction(raw / norm, norm, float(np.mean(norms)))


def run_job(client: Client, title: str, folder: Path, **job: Any) -> dict[str, Any]:
    """Submit a Job, show its progress, download its files; return the finished Job."""
    created = client.create_job(model=MODEL, name=title, **job)
    finished = follow(client, created["id"], title)
    client.download(finished["id"], folder)
    return finished


def contrast_requests() -> list[dict[str, Any]]:
    """Make the requests of Job 1; max_tokens 1, so exactly the prompt's positions run."""
    return [
        {"custom_id": f"{group}-{number}", "prompt": prompt}
        for group in ("happy", "sad")
        for number, prompt in enumerate(read_lines(PROMPTS / f"{group}.txt"))
    ]


def study_requests(prompts: Sequence[str], direction: Direction) -> list[dict[str, Any]]:
    """Make the requests of Job 2: for each prompt and strength a text and two scored words."""
    vector = encode(direction.vector[None])
    requests: list[dict[str, Any]] = []
    for strength in STRENGTHS:
        steer = {
            "activations": vector,
            "layer_indices": [LAYER],
            "scale": strength * direction.typical_norm,
        }
        for number, prompt in enumerate(prompts):
            name = f"{NAMES[strength]}-{number}"
            shared = {"apply_steering_vectors": [steer]}
            requests.append(
                {"custom_id": f"{name}-text", "prompt": prompt, "max_tokens": MAX_TOKENS, **shared}
            )
            requests.extend(
                {
                    "custom_id": f"{name}-{label}",
                    "prompt": prompt + word,
                    "max_tokens": 1,
                    "prompt_logprobs": 0,
                    **shared,
                }
                for label, word in (("good", GOOD), ("bad", BAD))
            )
    return requests


def read_study(folder: Path, prompts: list[str]) -> Study:
    """Read texts and log-probabilities of Job 2 from its downloaded Parquet files."""
    columns = ["custom_id", "text", "prompt_logprobs"]
    table = ds.dataset(folder / "results").to_table(columns=columns)
    rows = {row["custom_id"]: row for row in table.to_pylist()}
    texts: dict[float, list[str]] = {}
    scores: dict[float, list[float]] = {}
    for strength in STRENGTHS:
        names = [f"{NAMES[strength]}-{number}" for number in range(len(prompts))]
        texts[strength] = [rows[f"{name}-text"]["text"] for name in names]
        scores[strength] = [
            last_logprob(rows[f"{name}-good"]) - last_logprob(rows[f"{name}-bad"]) for name in names
        ]
    return Study(prompts, texts, scores)


def last_logprob(row: dict[str, Any]) -> float:
    """Give the log-probability of the prompt's last token: the scored word."""
    return float(row["prompt_logprobs"][-1][0]["logprob"])


def study(client: Client, out: Path, prompts: list[str]) -> tuple[int, str]:
    """Run both Jobs, print and save what came out.

    Return 0 when the scores are in order, else 1, and a line that sums up the Jobs.
    """
    first = run_job(
        client,
        "derive the direction",
        out / "derive",
        requests=contrast_requests(),
        defaults={"max_tokens": 1, "temperature": 0, "output_residual_stream": [LAYER]},
    )
    rows = read_residuals(out / "derive", LAYER)
    groups = [[rows[key] for key in rows if key.startswith(f"{g}-")] for g in ("happy", "sad")]
    direction = derive(*groups)
    np.savez(out / "direction.npz", vector=direction.vector, typical_norm=direction.typical_norm)
    print(
        f"direction at Layer {LAYER}: raw norm {direction.raw_norm:.1f}, "
        f"typical norm of the stream {direction.typical_norm:.1f}"
    )
    second = run_job(
        client,
        "steer",
        out / "steer",
        requests=study_requests(prompts, direction),
        defaults={"temperature": 0, "output_residual_stream": [LAYER]},
    )
    result = read_study(out / "steer", prompts)
    print_table(result, STRENGTHS)
    save_texts(result, STRENGTHS, out / "texts.csv")
    save_plot(result, STRENGTHS, out / "sentiment.png")
    print(f"every text: {out / 'texts.csv'}; the plot: {out / 'sentiment.png'}")
    means = [result.mean_score(strength) for strength in STRENGTHS]
    print(f"score, log p({GOOD!r}) - log p({BAD!r}): " + " < ".join(f"{m:+.2f}" for m in means))
    if sorted(means) != means or len(set(means)) != len(means):
        print("the scores do not rise with the strength", file=sys.stderr)
        return 1, closing_line([first, second])
    return 0, closing_line([first, second])


def closing_line(jobs: Sequence[dict[str, Any]]) -> str:
    """Sum up requests, tokens and speed of all Jobs."""
    usage = [job["usage"] for job in jobs]
    requests = sum(job["request_counts"]["total"] for job in jobs)
    seconds = sum(job["accounting"]["running"] for job in jobs)
    tokens = sum(item["total_tokens"] for item in usage)
    return (
        f"{requests} requests; tokens held {sum(u['charged'] + u['released'] for u in usage):,}, "
        f"charged {sum(u['charged'] for u in usage):,}, "
        f"released {sum(u['released'] for u in usage):,}; "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
    )


def main() -> int:
    """Read the command line, run the study on a service of its own, stop the service."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results")
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="the service's folder")
    parser.add_argument("--prompts", type=Path, default=PROMPTS / "study.txt")
    arguments = parser.parse_args()
    prompts = read_lines(arguments.prompts)
    if not prompts:
        parser.error(f"{arguments.prompts} has no prompts; write one a line")
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    with (
        running_stack(arguments.data) as credentials,
        Client(credentials["api_base"], credentials["api_key"]) as client,
    ):
        status, summary = study(client, arguments.out, prompts)
    print(summary)  # after the service has said that it stopped
    return status


if __name__ == "__main__":
    sys.exit(main())
