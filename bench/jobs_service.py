"""The whole service against `LLM.generate`, and its memory over a long Job with captures.

The service is `tiller up` as anyone starts it: API, reconciler, worker, Postgres with fsync, parts
in a folder. A Job's time is from the POST to its end, with every Parquet file durable: the POST's
own duration and job.accounting.total (which counts the last moment of the POST again).
LLM.generate runs the same prompts with the same engine arguments in a process of its own; both
stay alive and take turns. Afterwards tokens and rows are counted, and some requests of each round
are run once more without steering, to see that the others moved by scale x vector.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from app.catalog import load_catalog
from bench.alternate import Setting, Side, sides
from bench.service_parts import Memory, Sample, slope
from bench.workload import (
    MODEL,
    ONE_LAYER,
    SCALE,
    Load,
    Rows,
    Turn,
    prompts,
    share_right,
    steered_by,
    vectors,
)
from tiller.client import Client
from tiller.local_stack import running_stack
from tiller.results import read_capture
from tiller.tensors import encode

CHECKED = 64  # requests of a round that are run again without steering
SHARE_MIN = 0.95
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Ran:
    """A Job that ended: tokens a second over everything, and the service's own accounting."""

    job: Mapping[str, Any]
    tokens_per_s: float
    posted: float
    accounting: Mapping[str, float]


def load_of(options: argparse.Namespace, models: Path) -> Load:
    """Describe the work, with the engine arguments that the worker takes from its catalog."""
    model = load_catalog(models).get(MODEL)
    return Load(
        requests=options.service_requests,
        prompt=options.service_prompt,
        tokens=options.service_tokens,
        batch=model.max_num_seqs,
        kv_cache_mb=model.kv_cache_bytes >> 20,
        context=model.max_model_len,
        prefix_caching=True,
    )


def requests_of(load: Load, number: int, *, steer: Rows | None, capture: bool) -> list[Any]:
    """Write the requests of a round as a user sends them; `steer` is [requests, width]."""
    written = []
    for request, ids in enumerate(prompts(load, number)):
        one: dict[str, Any] = {"prompt": ids}
        if steer is not None:
            one["apply_steering_vectors"] = [
                {
                    "activations": encode(steer[request][None]),
                    "layer_indices": list(ONE_LAYER),
                    "scale": SCALE,
                }
            ]
        if capture:
            one["output_residual_stream"] = list(ONE_LAYER)
        written.append(one)
    return written


def run_job(client: Client, requests: Sequence[Any], tokens: int) -> Ran:
    """Send a Job and follow it to its end; check that every token was made."""
    defaults = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    job = client.create_job(model=MODEL, requests=requests, defaults=defaults)
    posted = time.perf_counter() - started
    job = client.wait(job["id"])
    made = job["usage"]["completion_tokens"]
    assert job["request_counts"]["succeeded"] == len(requests), job["request_counts"]
    assert made == len(requests) * tokens, made
    seconds = posted + job["accounting"]["total"]
    return Ran(job, made / seconds, posted, job["accounting"])


def check_steered(client: Client, ran: Ran, load: Load, number: int, steer: Rows) -> None:
    """See that requests moved as they should, against a Job that captures them unsteered."""
    count = min(CHECKED, load.requests)
    some = requests_of(load, number, steer=None, capture=True)[:count]
    plain = run_job(client, some, load.tokens)
    with tempfile.TemporaryDirectory() as folder:
        read = [_first_rows(client, one, load, Path(folder), count) for one in (plain, ran)]
    for request in range(count):
        was, now = (rows[request] for rows in read)
        share = share_right(was, now, steered_by("add", was, steer[request]))
        assert share > SHARE_MIN, f"request {request}: {share:.3f} of its numbers moved right"


def _first_rows(client: Client, ran: Ran, load: Load, folder: Path, count: int) -> Rows:
    """Download a Job and give the prompt's rows of its first requests: [count, prompt, width]."""
    home = client.download(ran.job["id"], folder / ran.job["id"])
    captured = read_capture(home, ONE_LAYER[0])
    requests = ran.job["request_counts"]["total"]
    assert len(captured.values) == requests * load.rows, len(captured.values)
    return captured.values.reshape(requests, load.rows, -1)[:count, : load.prompt]


@contextlib.contextmanager
def service_client(data: Path) -> Iterator[Client]:
    """Run a whole service in `data` and give a client of it."""
    with (
        running_stack(data) as credentials,
        Client(credentials["api_base"], credentials["api_key"], timeout=600) as client,
    ):
        yield client


def measure_service(options: argparse.Namespace, models: Path) -> tuple[Figures, list[str]]:
    """Let service and LLM.generate take turns; give figures and lines of the table."""
    load, data = load_of(options, models), models.parent
    folder, mode = load_catalog(models).get(MODEL).path, load_catalog(models).get(MODEL).mode
    steer = vectors(load)[:, ONE_LAYER[0]]
    speeds: dict[str, list[float]] = {"generate": [], "service": [], "service_both": []}
    kept: dict[str, list[Ran]] = {"service": [], "service_both": []}
    with (
        service_client(data) as client,
        sides(("plain",), folder, mode=mode, load=load, setting=Setting(), pythons={}) as running,
    ):
        _warm(client, running["plain"], load, steer)
        for number in range(1, options.repeats + 1):
            speeds["generate"].append(running["plain"].run(Turn("plain", round=number)))
            plain = requests_of(load, number, steer=None, capture=False)
            kept["service"].append(run_job(client, plain, load.tokens))
            both = requests_of(load, number, steer=steer, capture=True)
            kept["service_both"].append(run_job(client, both, load.tokens))
            for name, runs in kept.items():
                speeds[name].append(runs[-1].tokens_per_s)
            last = {name: round(each[-1]) for name, each in speeds.items()}
            print(f"round {number}: {last} tokens/s", flush=True)
            check_steered(client, kept["service_both"][-1], load, number, steer)
    return _service_figures(load, speeds, kept)


def _warm(client: Client, plain: Side, load: Load, steer: Rows) -> None:
    """Run a batch through both, so that nothing is done for the first time when it counts."""
    plain.run(Turn("plain", round=0))
    some = requests_of(load, 0, steer=steer, capture=True)[: load.batch]
    run_job(client, some, load.tokens)


def _service_figures(
    load: Load, speeds: Mapping[str, Sequence[float]], kept: Mapping[str, Sequence[Ran]]
) -> tuple[Figures, list[str]]:
    median = {name: statistics.median(each) for name, each in speeds.items()}
    figures: Figures = {"jobs.generate_tokens_per_s": round(median["generate"], 1)}
    what = f"{load.requests} requests of {load.prompt} + {load.tokens} tokens"
    lines = [f"| LLM.generate, {what}, tokens/s | {median['generate']:.0f} | |"]
    for name, runs in kept.items():
        ratio = median[name] / median["generate"]
        figures[f"jobs.{name}_vs_generate"] = round(ratio, 3)
        figures[f"jobs.{name}_tokens_per_s"] = round(median[name], 1)
        spread = f"{min(speeds[name]):.0f} to {max(speeds[name]):.0f} tokens/s"
        budget = ">= 0.95" if name == "service" else ""
        how = "plain" if name == "service" else "one layer steered and captured"
        lines.append(f"| service, {how}, of LLM.generate ({spread}) | {ratio:.3f} | {budget} |")
        parts = {key: statistics.median(run.accounting[key] for run in runs) for key in _PARTS}
        shown = ", ".join(f"{key} {value:.2f}" for key, value in parts.items())
        posted = statistics.median(run.posted for run in runs)
        lines.append(f"| where its seconds went: POST {posted:.2f}, {shown} | | |")
    return figures, lines


_PARTS = ("queued", "running", "publishing", "rest")


def service_processes() -> dict[str, psutil.Process]:
    """Find API, worker and engine among the descendants of this program."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "celeryd" in line or "-m worker --model" in line:
                found["worker"] = process
            elif "-m app serve" in line:
                found["api"] = process
    below = found["worker"].children(recursive=True)
    found["engine"] = max(below, key=lambda each: each.memory_info().rss)
    return found


def measure_memory(options: argparse.Namespace, models: Path) -> tuple[Figures, list[str]]:
    """Watch a long Job with captures; give the growth of each process and lines of the table."""
    options = argparse.Namespace(**vars(options))
    options.service_requests, options.service_tokens = (
        options.memory_requests,
        options.memory_tokens,
    )
    load, figures, lines = load_of(options, models), {}, []
    with service_client(models.parent) as client:
        warm = replace(load, requests=min(load.requests, 2 * load.batch))
        run_job(client, requests_of(warm, 0, steer=None, capture=True), load.tokens)
        with Memory(service_processes()) as memory:
            requests = requests_of(load, 1, steer=None, capture=True)
            run = run_job(client, requests, load.tokens)
    minutes = run.accounting["total"] / 60
    for name, samples in memory.samples.items():
        growth = slope(samples)
        rest = _late_growth(samples)
        figures[f"jobs.memory_mib_per_minute.{name}"] = round(growth, 2)
        figures[f"jobs.memory_mib_last_over_first_half.{name}"] = round(rest, 1)
        figures[f"jobs.memory_mib_max.{name}"] = round(memory.most(name), 1)
        anonymous = max(sample.anonymous for sample in samples)
        lines.append(
            f"| {name} over a Job of {load.requests} requests with captures ({minutes:.1f} min): "
            f"MiB at most (not file-backed); MiB a minute; second half over first "
            f"| {memory.most(name):.0f} ({anonymous:.0f}); {growth:+.1f}; {rest:+.1f} | flat |"
        )
    return figures, lines


def _late_growth(samples: Sequence[Sample]) -> float:
    """Compare the most held in the second half of the time with the most of the second quarter."""
    end = samples[-1].seconds
    early = [s.resident for s in samples if end / 4 <= s.seconds < end / 2]
    late = [s.resident for s in samples if s.seconds >= end / 2]
    return max(late) - max(early, default=late[0])
