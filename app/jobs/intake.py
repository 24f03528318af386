"""Takes a Job in: validate everything, then store it, its shards and its Holds in one transaction.

    order -> prepare (no writes; every problem of every request) -> store (all or nothing)

What `prepare` gives is compact: a request is a line of JSON by then, so a Job of 100,000 requests
stays within some tens of megabytes. Numbers of Steering vectors are stored once an account.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from uuid import UUID

import orjson
from psycopg.types.json import Jsonb

from app.catalog import ServedModel, Tokenizer
from app.completions.dose import Doses
from app.completions.problems import Problem
from app.completions.rows_of import RowsOf
from app.completions.spec import RequestSpec, spec_to_json
from app.completions.unlisted import not_listed
from app.completions.validate import Validator
from app.errors import InvalidRequestError, TooManyRequestsError
from app.jobs.capture_shapes import CaptureNames
from app.jobs.errors import InvalidJobError
from app.jobs.idempotency import IdempotencyKey, StoredAnswer, claim_key, keep_answer
from app.jobs.progress import job_object, view_job
from app.jobs.references import named_vectors
from app.jobs.schemas import Item, JobOrder, read_items
from app.jobs.shards import Size, last_seen_speed, plan_groups, plan_shards, size_of
from app.kit.db import Conn
from app.kit.ids import new_uuid
from app.ledger.holds import place_holds
from app.settings import Limits, Settings
from app.steering.spec import vector_names
from app.steering.vectors import (
    Vector,
    find_vectors,
    link_vectors,
    store_vectors,
    vectors_size,
)

BATCH_REQUESTS = 4096  # validated at once; one slice of the tokenizer
COPY_BYTES = 256 * 1024  # sent to Postgres at once


@dataclass(frozen=True, slots=True)
class Line:
    """A valid request, ready to be stored."""

    custom_id: str | None
    spec: bytes
    prompt_tokens: int
    tokens_held: int
    size: Size


@dataclass(slots=True)
class PreparedJob:
    """A Job in which everything is valid; its id is made here, so that storing may be repeated."""

    order: JobOrder
    model: ServedModel
    lines: list[Line]
    vectors: Mapping[str, Vector]
    vector_names: set[str]
    id: UUID = field(default_factory=new_uuid)


def prepare_job(
    order: JobOrder,
    model: ServedModel,
    tokenizer: Tokenizer,
    settings: Settings,
    *,
    stored: Mapping[str, Vector],
    captured: Mapping[RowsOf, Vector | str] = MappingProxyType({}),
    norms: Sequence[float] | None = None,
) -> PreparedJob:
    """Validate every request of an order. Raises InvalidJobError listing what is wrong."""
    if not model.listed:
        raise not_listed(model.name)
    limits = settings.limits
    validator = Validator(model, tokenizer, limits, stored=stored, captured=captured, is_job=True)
    doses = Doses(norms, stored, validator.vectors)
    report = _Report(limits.errors_reported)
    lines: list[Line] = []
    names: set[str] = set()
    first_with: dict[str, int] = {}
    captures = CaptureNames()
    batch: list[Item] = []
    room = limits.job_spec_bytes

    def check_batch() -> None:
        nonlocal room
        start = len(lines)
        outcomes = validator.check([item.body for item in batch])
        for index, (item, outcome) in enumerate(zip(batch, outcomes, strict=True), start):
            report.add(index, item.problems)
            report.add_twin(index, item.custom_id, first_with)
            if isinstance(outcome, RequestSpec):
                spec = doses.warned(outcome)
                spec = with_fixed_seed(spec, index) if order.reproducible else spec
                names.update(vector_names(spec.interventions, spec.captures))
                report.add(index, captures.problems(index, spec.captures))
                lines.append(_line(item, spec, model))
                room -= len(lines[-1].spec)
                if room < 0:  # at once: what a few kilobytes of defaults become may be gigabytes
                    raise _too_large(limits)
            else:
                report.add(index, outcome)
                lines.append(_NO_LINE)
        batch.clear()

    for item in read_items(order, limits):
        batch.append(item)
        if len(batch) == BATCH_REQUESTS:
            check_batch()
    check_batch()
    report.raise_if_any()
    return PreparedJob(order, model, lines, validator.vectors, names)


def _too_large(limits: Limits) -> InvalidRequestError:
    msg = (
        f"The Job's requests fill more than {limits.job_spec_bytes} bytes with defaults "
        "merged into each. Send fewer requests, or fewer positions and interventions in each."
    )
    return InvalidRequestError(msg, param="requests", code="job_too_large")


def load_named_vectors(
    conn: Conn, account_id: UUID, order: JobOrder, limits: Limits
) -> dict[str, Vector]:
    """Read the stored vectors that an order names. Raises InvalidRequestError for too many."""
    names = named_vectors(order, limits)
    size = vectors_size(conn, account_id, names)
    if size > limits.named_vectors_bytes:
        msg = (
            f"The Job names stored vectors of {size} bytes in all; at most "
            f"{limits.named_vectors_bytes} are allowed. Send it as several Jobs."
        )
        raise InvalidRequestError(msg, param="requests", code="named_vectors_too_large")
    return find_vectors(conn, account_id, names)


def store_job(
    conn: Conn,
    account_id: UUID,
    prepared: PreparedJob,
    settings: Settings,
    key: IdempotencyKey | None,
) -> tuple[StoredAnswer, bool]:
    """Store a Job and hold its tokens; give the answer, and whether it is an earlier one.

    Repeatable with the same PreparedJob. Raises InsufficientTokensError, TooManyRequestsError,
    and the errors of idempotency; then nothing is stored.
    """
    if key is not None and (answer := claim_key(conn, account_id, key)) is not None:
        return answer, True
    view = view_job(conn, account_id, prepared.id)
    if view is None:
        _insert_job(conn, account_id, prepared, settings)
        store_vectors(conn, account_id, prepared.vectors.values())
        link_vectors(conn, account_id, prepared.id, prepared.vector_names)
        _copy_requests(conn, prepared)
        _insert_shards(conn, prepared, settings)
        amounts = (line.tokens_held for line in prepared.lines)
        place_holds(conn, account_id, prepared.id, enumerate(amounts))
        _refuse_too_many(conn, account_id, settings)
        view = view_job(conn, account_id, prepared.id)
        assert view is not None
    answer = StoredAnswer(202, orjson.dumps(job_object(view)).decode())
    if key is not None:
        keep_answer(conn, account_id, key, answer)
    return answer, False


class _Report:
    """Collects problems, keeping the first ones and counting all."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._kept: list[tuple[int | None, Problem]] = []
        self._total = 0

    def add(self, index: int, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._total += 1
            if len(self._kept) < self._kept_max:
                self._kept.append((index, problem))

    def add_twin(self, index: int, custom_id: str | None, first_with: dict[str, int]) -> None:
        """Add a problem when another request has this custom_id."""
        if custom_id is None or (first := first_with.setdefault(custom_id, index)) == index:
            return
        message = (
            f"custom_id {custom_id!r} is that of requests[{first}] and of requests[{index}]; it "
            "must be unique in a Job."
        )
        self.add(index, [Problem("custom_id", message, "duplicate_custom_id")])

    def raise_if_any(self) -> None:
        if self._kept:
            raise InvalidJobError(self._kept, self._total)


def with_fixed_seed(spec: RequestSpec, index: int) -> RequestSpec:
    """Give a request that draws tokens without a seed one that depends on its index alone."""
    sampling = spec.sampling
    if sampling.seed is not None or sampling.temperature == 0:
        return spec
    digest = hashlib.sha256(b"request %d of a reproducible Job" % index).digest()
    seed = int.from_bytes(digest[:4], "big") >> 1
    return replace(spec, sampling=replace(sampling, seed=seed))


def _line(item: Item, spec: RequestSpec, model: ServedModel) -> Line:
    # A copy, because orjson gives 4 KiB to every short text: 400 MB for 100,000 requests.
    content = bytes(memoryview(orjson.dumps(spec_to_json(spec))))
    size = size_of(spec, model)
    return Line(item.custom_id, content, spec.prompt_tokens, spec.tokens_held, size)


# Stands for a request with problems, so that indices stay right; never stored.
_NO_LINE = Line(None, b"", 0, 0, Size(0, 0))


def _insert_job(conn: Conn, account_id: UUID, prepared: PreparedJob, settings: Settings) -> None:
    order, model = prepared.order, prepared.model
    conn.execute(
        """
        INSERT INTO jobs (id, account_id, state, name, metadata, model, model_revision, dtype,
            reproducible, priority, n_total, expires_at)
        VALUES (%(id)s, %(account_id)s, 'queued', %(name)s, %(metadata)s, %(model)s, %(revision)s,
            %(dtype)s, %(reproducible)s, %(priority)s, %(total)s,
            now() + make_interval(secs => %(expires_in)s))
        """,
        {
            "id": prepared.id,
            "account_id": account_id,
            "name": order.name,
            "metadata": Jsonb(order.metadata),
            "model": model.name,
            "revision": model.revision,
            "dtype": model.dtype,
            "reproducible": order.reproducible,
            "priority": order.priority,
            "total": len(prepared.lines),
            "expires_in": order.expires_in or settings.default_expires_seconds,
        },
    )


def _copy_requests(conn: Conn, prepared: PreparedJob) -> None:
    with (
        conn.cursor() as cursor,
        cursor.copy(
            "COPY requests (job_id, request_index, custom_id, prompt_tokens, spec) FROM STDIN"
        ) as copy,
    ):
        for block in _copy_blocks(prepared):
            copy.write(block)


def _copy_blocks(prepared: PreparedJob) -> Iterator[bytes]:
    """Write lines in COPY's text format; only backslashes can need an escape here.

    orjson escapes every control character, and a custom_id is printable.
    """
    job_id = prepared.id.hex.encode()
    block = bytearray()
    for index, line in enumerate(prepared.lines):
        custom_id = rb"\N"
        if line.custom_id is not None:
            custom_id = line.custom_id.encode().replace(b"\\", b"\\\\")
        spec = line.spec.replace(b"\\", b"\\\\")
        block += b"%s\t%d\t%s\t%d\t%s\n" % (job_id, index, custom_id, line.prompt_tokens, spec)
        if len(block) >= COPY_BYTES:
            yield bytes(block)
            block.clear()
    yield bytes(block)


def _insert_shards(conn: Conn, prepared: PreparedJob, settings: Settings) -> None:
    model, sizes = prepared.model, (line.size for line in prepared.lines)
    if prepared.order.reproducible:
        shards = plan_groups(sizes, settings, batch_max=model.max_num_seqs)
    else:
        speed = last_seen_speed(conn, model.name)
        shards = plan_shards(sizes, settings, tokens_per_second=speed)
    with (
        conn.cursor() as cursor,
        cursor.copy("COPY shards (job_id, first_index, end_index) FROM STDIN") as copy,
    ):
        for first, end in shards:
            copy.write_row((prepared.id, first, end))


def _refuse_too_many(conn: Conn, account_id: UUID, settings: Settings) -> None:
    """Count unfinished Jobs; place_holds has locked the account, so the count is exact."""
    row: dict[str, Any] | None = conn.execute(
        """
        SELECT count(*) AS live FROM jobs
        WHERE account_id = %s AND state NOT IN ('completed', 'failed', 'cancelled', 'expired')
        """,
        (account_id,),
    ).fetchone()
    live_max = settings.limits.live_jobs
    if row is not None and row["live"] > live_max:
        msg = (
            f"The account has {row['live'] - 1} unfinished Jobs; at most {live_max} are allowed. "
            "Wait for one to finish, cancel one, or put more requests into one Job."
        )
        raise TooManyRequestsError(msg, code="too_many_live_jobs", retry_after=60)
