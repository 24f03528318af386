"""How fast one core turns captured bfloat16 vectors into published Parquet, and in what memory.

The real part writer, on one core, from mapped files as an engine leaves them to durable objects in
a folder: widening, statistics, Parquet, zstd, sha256, fsync. The numbers imitate residual streams:
normal, with a scale of its own for each dimension. Each shape is written five times, the median
counts. Memory is watched in a process of its own, for this many requests and for four times as
many, to see that it does not follow.

Figure: results.write_mb_per_s, the lowest median of all shapes, in MB of bfloat16 a second of the
processor (all threads, kernel included), so that a busy machine does not change it. By the clock it
is the same on an idle machine; that is reported beside it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from app.completions.spec import RequestSpec, Sampling
from app.jobs.records import LeasedShard
from app.kit.ids import new_uuid
from app.steering.spec import Capture, Site
from app.storage import open_store
from bench.report import machine, save
from worker.engine.protocol import EngineFacts
from worker.outcomes import CaptureRows, Choice, Outcome, Succeeded, Work
from worker.part_writer import PartWriter, job_meta

REPEATS = 5
PROMPT, GENERATED = 20, 31
ROWS = PROMPT + GENERATED - 1
TOKENS = tuple(range(GENERATED))


@dataclass(frozen=True)
class Shape:
    """One kind of part: how wide vectors are, how many layers, how many requests."""

    width: int
    layers: int
    requests: int

    @property
    def megabytes(self) -> float:
        """Size of the captured vectors as bfloat16."""
        return self.requests * self.layers * ROWS * self.width * 2 / 1e6


SHAPES = (Shape(4096, 1, 320), Shape(4096, 32, 10), Shape(576, 30, 80), Shape(576, 1, 512))


@dataclass(frozen=True)
class Timed:
    """One run: seconds by the clock and of the processor, bytes stored, memory used at most.

    Memory is what is not backed by a file: mapped input can be dropped at any time.
    """

    seconds: float
    cpu_seconds: float
    stored: int
    grown_mb: float


def outcomes(shape: Shape, folder: Path) -> list[tuple[Work, Outcome]]:
    """Lay captured vectors into mapped files, a file a request."""
    rng = np.random.default_rng(7)
    scales = np.exp(rng.standard_normal(shape.width)).astype(np.float32)
    layers = tuple(range(shape.layers))
    spec = RequestSpec(
        prompt_token_ids=tuple(range(PROMPT)),
        prompt="a prompt of twenty tokens",
        sampling=Sampling(max_tokens=GENERATED),
        captures=(Capture("residual_stream", Site.resid_post, layers),),
    )
    made: list[tuple[Work, Outcome]] = []
    for index in range(shape.requests):
        path = folder / str(index)
        size = (shape.layers, ROWS, shape.width)
        mapped = np.memmap(path, np.uint16, "w+", shape=size)
        mapped[:] = (rng.standard_normal(size, np.float32) * scales).view(np.uint32) >> 16
        mapped.flush()
        mapped = np.memmap(path, np.uint16, "r", shape=size)
        positions = np.arange(ROWS, dtype=np.int32)
        vectors = dict(enumerate(mapped))
        captured = CaptureRows("residual_stream", "bfloat16", vectors, positions, path=path)
        choice = Choice(0, "some text", TOKENS, "length")
        made.append((Work(index, f"c-{index}", spec), Succeeded((choice,), (captured,))))
    return made


def write_part(shape: Shape) -> Timed:
    """Write one part, from outcomes to durable objects."""
    facts = EngineFacts("m", "r", "e", "eager", "bfloat16", shape.width, shape.layers, 64)
    shard = LeasedShard(
        id=1,
        job_id=new_uuid(),
        account_id=new_uuid(),
        first_index=0,
        end_index=shape.requests,
        lease_token=1,
        attempt=1,
        engine_deaths=0,
        reproducible=False,
    )
    with tempfile.TemporaryDirectory(prefix="tiller-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "captured").mkdir()
        work = outcomes(shape, folder / "captured")
        store = open_store((folder / "objects").as_uri())
        with PeakMemory() as peak:
            start, cpu_start = time.perf_counter(), time.process_time()
            writer = PartWriter(folder / "spool", store, job_meta(shard, facts), shard, facts)
            for item, outcome in work:
                writer.add(item, outcome)
            part = writer.close()
            cpu_seconds = time.process_time() - cpu_start
            seconds = time.perf_counter() - start
    rows = sum(file.rows for file in part.files if file.kind == "activations")
    assert rows == shape.requests * shape.layers * ROWS
    return Timed(seconds, cpu_seconds, sum(file.bytes for file in part.files), peak.grown_mb)


def memory_mb(shape: Shape) -> float:
    """Write one part in a fresh process; return how far its memory grew."""
    words = [str(shape.width), str(shape.layers), str(shape.requests)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.results_write", *words],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


class PeakMemory:
    """Watches how far memory that is not file-backed grows while it is entered."""

    def __enter__(self) -> Self:
        """Begin to watch, every 5 ms."""
        self._base = self._most = _anonymous_mb()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()
        self.grown_mb = self._most - self._base

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, _anonymous_mb())


def _anonymous_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def main() -> None:
    """Measure, then write the figures and the table."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    write_part(Shape(64, 1, 8))  # imports and thread pools are not what is measured
    figures: dict[str, float] = {}
    header = "vectors | raw MB | MB a core-second | MB/s by the clock | stored / raw"
    lines = [
        f"| {header} | memory MB | memory MB at x 4 |",
        "|---|---|---|---|---|---|---|",
    ]
    speeds = []
    for shape in SHAPES:
        runs = [write_part(shape) for _ in range(REPEATS)]
        speed = shape.megabytes / statistics.median(run.cpu_seconds for run in runs)
        clock = shape.megabytes / statistics.median(run.seconds for run in runs)
        grown = memory_mb(shape)
        grown_large = memory_mb(Shape(shape.width, shape.layers, 4 * shape.requests))
        ratio = runs[0].stored / (shape.megabytes * 1e6)
        speeds.append(speed)
        name = f"hidden_{shape.width}_layers_{shape.layers}"
        figures[f"results.write_mb_per_s.{name}"] = round(speed, 1)
        figures[f"results.write_mb_per_s_by_clock.{name}"] = round(clock, 1)
        figures[f"results.stored_ratio.{name}"] = round(ratio, 3)
        figures[f"results.memory_mb.{name}"] = round(grown, 1)
        figures[f"results.memory_mb_at_x4.{name}"] = round(grown_large, 1)
        lines.append(
            f"| {shape.width} wide, {shape.layers} layers, {shape.requests} requests "
            f"| {shape.megabytes:.0f} | {speed:.0f} | {clock:.0f} | {ratio:.3f} | {grown:.0f} "
            f"| {grown_large:.0f} |"
        )
        print(lines[-1], flush=True)
    figures["results.write_mb_per_s"] = round(min(speeds), 1)
    facts = machine("pyarrow", "numpy", "obstore").replace("cores;", "cores (one used);")
    intro = [
        facts,
        "Goal: at least 100 MB/s a core, and memory that does not grow with the part. Memory is",
        "what is allocated while writing, in a fresh process; mapped input is not counted.",
        "",
    ]
    title = "results_write: captured bfloat16 to durable Parquet, one core"
    save("results_write", title, figures, [*intro, *lines])


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(write_part(Shape(*map(int, sys.argv[1:]))).grown_mb)
    else:
        main()
