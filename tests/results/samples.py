"""Requests, outcomes and parts as an engine and a worker would make them, from known numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import numpy.typing as npt

from app.completions.spec import RequestSpec, Sampling
from app.jobs.records import LeasedShard
from app.kit.ids import new_uuid
from app.steering.spec import Capture, Intervention, Op, Site
from app.storage import ObjectStore
from worker.engine.protocol import EngineFacts
from worker.outcomes import CaptureRows, Choice, Succeeded, TokenLogprob, Work
from worker.part_writer import PartWriter, job_meta

HIDDEN = 32
PROMPT = 5
GENERATED = 4
ROWS = PROMPT + GENERATED - 1
FACTS = EngineFacts(
    model="tiny",
    revision="revision-1",
    engine="stub 1.0",
    mode="eager",
    dtype="bfloat16",
    hidden_size=HIDDEN,
    n_layers=4,
    max_num_seqs=8,
)


def a_shard(first: int = 0, end: int = 4, *, job_id: UUID | None = None) -> LeasedShard:
    """Describe a lease."""
    return LeasedShard(
        id=1,
        job_id=job_id or new_uuid(),
        account_id=new_uuid(),
        first_index=first,
        end_index=end,
        lease_token=17,
        attempt=1,
        engine_deaths=0,
        reproducible=False,
    )


def open_part(shard: LeasedShard, store: ObjectStore, spool: Path) -> PartWriter:
    """Open the writer of a shard's part."""
    return PartWriter(spool, store, job_meta(shard, FACTS), shard, FACTS)


def bf16_rows(seed: int, rows: int = ROWS, width: int = HIDDEN) -> npt.NDArray[np.uint16]:
    """Make random bfloat16 bit patterns of finite numbers, subnormal and negative zero included."""
    bits = np.random.default_rng(seed).integers(0, 2**16, (rows, width), dtype=np.uint16)
    infinite = (bits & 0x7F80) == 0x7F80
    bits[infinite] &= 0xBFFF
    bits[0, 0] = 0x8000
    return bits


@dataclass(frozen=True)
class Ran:
    """A request with its outcome, and the numbers that a reader must get back."""

    work: Work
    outcome: Succeeded
    bits: dict[int, npt.NDArray[np.uint16]]

    @property
    def captured_file(self) -> Path:
        """The mapped file behind the captured vectors."""
        path = self.outcome.captures[0].path
        assert path is not None
        return path


def a_run(index: int, folder: Path, *, layers: Sequence[int] = (1, 3), rows: int = ROWS) -> Ran:
    """Make a steered request that captured `layers`, its vectors in a mapped file."""
    steer = Intervention(Op.add, Site.resid_post, layers[0], "sv_" + "0" * 64, 0, spans=((1, 3),))
    spec = RequestSpec(
        prompt_token_ids=tuple(range(10, 10 + PROMPT)),
        prompt="Hello there",
        sampling=Sampling(max_tokens=rows - PROMPT + 1, seed=5),
        interventions=(steer,),
        captures=(Capture("residual_stream", Site.resid_post, tuple(layers)),),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rows-{index}"
    mapped = np.memmap(path, np.uint16, "w+", shape=(len(layers), rows, HIDDEN))
    bits = {layer: bf16_rows(1000 * index + layer, rows) for layer in layers}
    for number, layer in enumerate(layers):
        mapped[number] = bits[layer]
    captured = CaptureRows(
        "residual_stream",
        "bfloat16",
        {layer: mapped[number] for number, layer in enumerate(layers)},
        np.arange(rows, dtype=np.int32),
        path=path,
    )
    choice = Choice(0, f"text {index}", tuple(range(50, 50 + rows - PROMPT + 1)), "length")
    outcome = Succeeded((choice,), (captured,), started_at=1.5, finished_at=2.5)
    return Ran(Work(index, f"c-{index}", spec), outcome, bits)


def a_plain_run(index: int, *, n: int = 2, text: str = "Grüße\n") -> tuple[Work, Succeeded]:
    """Make an unsteered request of `n` choices with logprobs."""
    tokens = (7, 8, 9)
    spec = RequestSpec((1, 2), None, Sampling(max_tokens=6, n=n, seed=3, logprobs=2))
    top = tuple(
        (TokenLogprob(token, f"<{token}>", -0.5), TokenLogprob(token + 1, "é", -1.25))
        for token in tokens
    )
    choices = tuple(
        Choice(i, text, tokens[: 3 - i], "stop", "END", (-0.5,) * (3 - i), top[: 3 - i])
        for i in range(n)
    )
    prompt = (None, (TokenLogprob(2, "b", -2.0),))
    return Work(index, None, spec), Succeeded(choices, (), prompt, 1.5, 2.5)
