"""Cuts a Job into shards: contiguous ranges, each about half a minute of work and one part file.

A shard ends when the next request would make it too long or its part too big. Time alone never
cuts below `shard_requests_min` (tiny shards cost more than they spread); size does, because a
worker keeps a whole part on disk.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from app.catalog import ServedModel
from app.completions.captures import capture_bytes
from app.completions.spec import RequestSpec
from app.kit.db import Conn
from app.settings import Settings

# Until a worker of the model has told its speed: a small model on a few CPU cores.
TOKENS_PER_SECOND_ASSUMED = 500.0
# A prompt token costs about a tenth of a generated one (they run many at a time).
PROMPT_TOKEN_COST = 0.1
TEXT_BYTES_PER_TOKEN = 10
LOGPROB_BYTES = 12


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
    if spec.captures:
        size += capture_bytes(spec.captures, model, rows=spec.capture_rows_max)
    return Size(made + PROMPT_TOKEN_COST * spec.prompt_tokens, size)


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
