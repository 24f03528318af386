"""Cuts a Job into shards: contiguous ranges, each about half a minute of work and one part file.

A shard ends when the next request would make it too long or its part too big. Time alone never
cuts below `shard_requests_min` (tiny shards cost more than they spread); size does, because a
worker keeps a whole part on disk. The groups of a reproducible Job know nothing of time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from app.catalog import ServedModel
from app.completions.captures import REDUCED_ITEM_BYTES
from app.completions.spec import RequestSpec
from app.kit.db import Conn
from app.settings import Settings
from app.steering.spec import Capture, Reduce
from app.steering.vectors import ITEM_BYTES

# Until a worker of the model has told its speed: a small model on a few CPU cores.
TOKENS_PER_SECOND_ASSUMED = 500.0
# A prompt token costs about a tenth of a generated one (they run many at a time).
PROMPT_TOKEN_COST = 0.1
TEXT_BYTES_PER_TOKEN = 10
LOGPROB_BYTES = 12
PLACE_BYTES = 4  # position, token id and flags of a captured row, compressed


@dataclass(frozen=True, slots=True)
class Size:
    """What a request is expected to need: generated tokens (prompt tokens weighted), part bytes."""

    tokens: float
    part_bytes: int


def size_of(spec: RequestSpec, model: ServedModel) -> Size:
    """Estimate a request at its full max_tokens."""
    sampling = spec.sampling
    made = sampling.n * sampling.max_tokens
    per_token = TEXT_BYTES_PER_TOKEN + LOGPROB_BYTES * (1 + (sampling.logprobs or 0))
    size = spec.prompt_tokens * TEXT_BYTES_PER_TOKEN + made * per_token
    size += spec.prompt_tokens * LOGPROB_BYTES * (sampling.prompt_logprobs or 0)
    for capture in spec.captures:
        size += len(capture.layers) * _part_rows_bytes(capture, spec.capture_rows_max, model)
    return Size(made + PROMPT_TOKEN_COST * spec.prompt_tokens, size)


def _part_rows_bytes(capture: Capture, positions: int, model: ServedModel) -> int:
    """Estimate what a capture of 0..positions - 1 leaves in a part at one layer.

    Rows in the model's dtype compress to about that size; reduced ones are float32. A mean is one
    row, whatever it was taken over.
    """
    rows = capture.rows(positions)
    if capture.reduce is Reduce.mean:
        rows = min(rows, 1)
    item = ITEM_BYTES[model.dtype] if capture.reduce is Reduce.none else REDUCED_ITEM_BYTES
    return rows * (capture.width(model.site_width(capture.site)) * item + PLACE_BYTES)


def plan_shards(
    sizes: Iterable[Size], settings: Settings, *, tokens_per_second: float
) -> list[tuple[int, int]]:
    """Cut requests 0..n-1 into ranges [first_index, end_index) that cover all of them."""
    tokens_max = settings.shard_seconds * tokens_per_second
    shards: list[tuple[int, int]] = []
    first = index = 0
    tokens, part_bytes = 0.0, 0
    for index, size in enumerate(sizes):
        count = index - first
        too_long = count >= settings.shard_requests_min and tokens + size.tokens > tokens_max
        too_big = count > 0 and part_bytes + size.part_bytes > settings.shard_bytes
        if too_long or too_big or count >= settings.shard_requests_max:
            shards.append((first, index))
            first, tokens, part_bytes = index, 0.0, 0
        tokens += size.tokens
        part_bytes += size.part_bytes
    shards.append((first, index + 1))
    return shards


def plan_groups(
    sizes: Iterable[Size], settings: Settings, *, batch_max: int
) -> list[tuple[int, int]]:
    """Cut a reproducible Job into groups that depend on the Job and settings alone.

    A group begins at each multiple of the group size (at most `batch_max`, the engine's batch),
    and within one where the part would become too big.
    """
    group = min(settings.reproducible_group_requests, batch_max)
    starts: list[int] = []
    index = -1
    part_bytes = 0
    for index, size in enumerate(sizes):
        if index % group == 0 or part_bytes + size.part_bytes > settings.shard_bytes:
            starts.append(index)
            part_bytes = 0
        part_bytes += size.part_bytes
    return list(pairwise([*starts, index + 1]))


def last_seen_speed(conn: Conn, model: str) -> float:
    """Give the tokens a second that the model's workers last told, or the assumed speed."""
    row = conn.execute(
        """
        SELECT tokens_per_second FROM workers
        WHERE model = %s AND tokens_per_second > 0
        ORDER BY heartbeat_at DESC LIMIT 1
        """,
        (model,),
    ).fetchone()
    return TOKENS_PER_SECOND_ASSUMED if row is None else float(row["tokens_per_second"])
