"""How fast the API takes in a Job of many plain requests: validate, count tokens, hold, store.

One POST of all requests with prompts of text, to the real API in its own process before the
embedded Postgres (with fsync). The main figure counts the processor time of API and Postgres
together, so that a busy machine does not change it; by the clock it is reported beside.
"""

import argparse
import random
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil
import tokenizers

from app.kit.ids import new_uuid
from bench.service_parts import BareService, Memory, cpu_seconds
from bench.workload import MODEL

PROMPT_TOKENS = 20
FIGURE = "jobs.intake_requests_per_s"


@dataclass(frozen=True, slots=True)
class Taken:
    """One Job taken in: seconds of each kind, and the API's memory at most, in MiB."""

    clock: float
    api: float
    postgres: float
    resident: float


def prompts_of_words(tokenizer_file: Path, count: int) -> list[str]:
    """Make texts of exactly PROMPT_TOKENS tokens: words of the vocabulary that stay whole."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    words = sorted(
        text[1:]
        for text in tokenizer.get_vocab()
        if text.startswith("Ġ") and text[1:].isascii() and text[1:].isalpha()
    )
    rng = random.Random(11)
    texts = [" " + " ".join(rng.choices(words, k=PROMPT_TOKENS)) for _ in range(count)]
    lengths = {len(each.ids) for each in tokenizer.encode_batch(texts[:100])}
    assert lengths == {PROMPT_TOKENS}, lengths
    return texts


def body_of(texts: list[str]) -> bytes:
    """Write a Job of these prompts."""
    requests = [{"custom_id": f"c-{n}", "prompt": text} for n, text in enumerate(texts)]
    return orjson.dumps({"model": MODEL, "requests": requests, "defaults": {"max_tokens": 16}})


def free_port() -> int:
    """Find a free port on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def take_in(service: BareService, api: psutil.Process, address: str, body: bytes) -> Taken:
    """Post one Job and measure."""
    import httpx

    headers = {
        "authorization": f"Bearer {service.api_key}",
        "content-type": "application/json",
        "idempotency-key": str(new_uuid()),
    }
    api_before, postgres_before = cpu_seconds(api), service.postgres_cpu_seconds()
    with Memory({"api": api}, pause=0.02) as memory:
        started = time.perf_counter()
        answer = httpx.post(f"{address}/v1/jobs", content=body, headers=headers, timeout=600)
        clock = time.perf_counter() - started
    assert answer.status_code == httpx.codes.ACCEPTED, answer.text[:2000]
    return Taken(
        clock,
        cpu_seconds(api) - api_before,
        service.postgres_cpu_seconds() - postgres_before,
        memory.most("api"),
    )


def measure(
    options: argparse.Namespace, models: Path, folder: Path
) -> tuple[dict[str, float], list[str]]:
    """Take in the same Job several times; give figures and lines of the table."""
    count: int = options.intake_requests
    texts = prompts_of_words(models.parent / "models" / MODEL / "tokenizer.json", count)
    body = body_of(texts)
    with BareService(folder, models) as service:
        api, address = service.start_api(free_port())
        take_in(service, api, address, body_of(texts[:1000]))  # loads the tokenizer
        runs = [take_in(service, api, address, body) for _ in range(options.repeats)]
        with service.database.transaction() as conn:
            row = conn.execute("SELECT count(*) AS n, sum(prompt_tokens) AS p FROM requests")
            stored = row.fetchone()
    n_stored = options.repeats * count + min(count, 1000)
    assert stored == {"n": n_stored, "p": n_stored * PROMPT_TOKENS}, stored
    cores = count / statistics.median(run.api + run.postgres for run in runs)
    api_core = count / statistics.median(run.api for run in runs)
    clock = count / statistics.median(run.clock for run in runs)
    held = [run.resident for run in runs]
    figures = {
        FIGURE: round(cores),
        f"{FIGURE}.api_core_alone": round(api_core),
        f"{FIGURE}.by_clock": round(clock),
        "jobs.intake_api_mib_max": round(max(held), 1),
        "jobs.intake_api_mib_last_over_first": round(held[-1] - held[0], 1),
    }
    what = f"{count} requests of {PROMPT_TOKENS} tokens ({len(body) / 1e6:.1f} MB)"
    grown = f"{max(held):.0f}; {held[-1] - held[0]:+.1f}"
    lines = [
        f"| intake of {what}, a core-second of API and Postgres | {cores:.0f} | 10000 |",
        f"| the same, a core-second of the API / by the clock | {api_core:.0f} / {clock:.0f} | |",
        f"| API, MiB at most over {len(runs)} such Jobs; last over first | {grown} | < 512, flat |",
    ]
    return figures, lines
