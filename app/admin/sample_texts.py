"""A few texts of a Job, read out of its parts: each steered one beside its baseline.

    first requests (Postgres) -> pairs with the same prompt, seed and sampling -> parts -> rows

A baseline is a request with no intervention, or only such that change nothing (scale 0). Where the
first requests have no counterpart it is looked for where a sweep in order of strength has it: one
equal part of the Job further, or several. A thousand specs and a dozen row groups are read at
most, whatever the Job's size.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from psycopg.types.json import Jsonb

from app.admin.steering_words import steering_in_words
from app.completions.spec import RequestSpec, Sampling, spec_from_json
from app.kit.db import Conn
from app.results.stored_file import StoredFile
from app.storage import ObjectStore, StoreError, job_key

log = logging.getLogger(__name__)

LOOKED_AT_MAX: Final = 400
REPEATS_MAX: Final = 100  # equal parts of a sweep: strengths, times layers
PROBES_MAX: Final = 1000
SPEC_CHARS_MAX: Final = 8_000_000  # of all specs together; requests with 16 mixtures are large
SAMPLES_MAX: Final = 6
GROUPS_MAX: Final = 12
TEXT_CHARS_MAX: Final = 1500
COLUMNS: Final = ["request_index", "choice_index", "status", "text", "finish_reason"]


@dataclass(frozen=True, slots=True)
class Version:
    """One text of a request, and what was done to the model while it was written."""

    request_index: int
    custom_id: str | None
    steering: Sequence[str]
    text: str
    finish_reason: str | None
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its steered text, its baseline, or both."""

    prompt: str
    baseline: Version | None
    steered: Version | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A succeeded request that could be shown."""

    index: int
    custom_id: str | None
    spec: RequestSpec

    @property
    def is_baseline(self) -> bool:
        """Whether the model ran as it is."""
        return all(item.changes_nothing for item in self.spec.interventions)


Pair: TypeAlias = tuple[Candidate | None, Candidate | None]  # baseline, steered
Shared: TypeAlias = tuple[tuple[int, ...], Sampling]  # prompt and sampling


@dataclass(frozen=True, slots=True)
class Part:
    """A results file and the requests that it covers."""

    path: str
    bytes: int
    first_index: int
    end_index: int


def choose(conn: Conn, job_id: UUID, total: int) -> list[Pair]:
    """Choose pairs (baseline, steered) for the first of a Job's `total` requests, best first."""
    together: dict[Shared, list[Candidate]] = defaultdict(list)
    for candidate in _candidates(conn, job_id):
        together[_what_is_equal(candidate.spec)].append(candidate)
    alone = {key: group for key, group in together.items() if _is_one_sided(group)}
    if len(together) - len(alone) < SAMPLES_MAX:
        sought = [group[0] for group in alone.values()][:SAMPLES_MAX]
        for candidate in _counterparts(conn, job_id, sought, total):
            if (key := _what_is_equal(candidate.spec)) in alone:
                together[key].append(candidate)
    pairs: list[list[Pair]] = []
    lone: list[Pair] = []
    for group in together.values():
        plain = next((item for item in group if item.is_baseline), None)
        steered = [item for item in group if not item.is_baseline]
        if plain is not None and steered:
            pairs.append([(plain, item) for item in steered])
        elif steered:
            lone.append((None, steered[0]))
        elif plain is not None:
            lone.append((plain, None))
    # One pair of each prompt before a second of any, and not always the same strength.
    rounds = range(max(map(len, pairs), default=0))
    chosen = [
        group[(number + turn) % len(group)]
        for number in rounds
        for turn, group in enumerate(pairs)
        if number < len(group)
    ]
    return (chosen + lone)[:SAMPLES_MAX]


def parts_of(conn: Conn, job_id: UUID, indices: Iterable[int]) -> list[Part]:
    """Find the results files that hold these requests."""
    rows = conn.execute(
        """
        SELECT f.path, f.bytes, p.first_index, p.end_index
        FROM parts p JOIN result_files f ON f.lease_token = p.lease_token AND f.kind = 'results'
        WHERE p.job_id = %s AND p.superseded_at IS NULL AND EXISTS (
            SELECT 1 FROM unnest(%s::integer[]) AS wanted
            WHERE wanted >= p.first_index AND wanted < p.end_index)
        ORDER BY p.first_index LIMIT %s
        """,
        [job_id, sorted(set(indices)), GROUPS_MAX],
    )
    return [Part(**row) for row in rows]


def read_samples(
    store: ObjectStore,
    job_id: UUID,
    pairs: Sequence[Pair],
    parts: Sequence[Part],
) -> list[Sample]:
    """Read the texts of chosen requests; a pair whose texts are not there is left out."""
    wanted = {item.index for pair in pairs for item in pair if item is not None}
    texts: dict[int, dict[str, Any]] = {}
    groups = GROUPS_MAX
    for part in parts:
        inside = {index for index in wanted if part.first_index <= index < part.end_index}
        try:
            for table in _groups(store, job_id, part, inside, groups):
                groups -= 1
                texts |= _first_choices(table, inside)
        except StoreError as error:
            # The store itself is away; asking it for the other parts would only take longer.
            log.warning("store not readable", extra={"path": part.path, "error": str(error)})
            break
        except (OSError, pa.ArrowException) as error:
            # A part that is gone or damaged: the others are worth showing.
            log.warning("part not readable", extra={"path": part.path, "error": str(error)})
    samples = []
    for baseline, steered in pairs:
        versions = [_version(item, texts) for item in (baseline, steered)]
        some = next((item for item in (steered, baseline) if item is not None), None)
        if some is not None and any(versions):
            samples.append(Sample(_prompt(some.spec), *versions))
    return samples


def read_text(
    store: ObjectStore, job_id: UUID, parts: Sequence[Part], index: int
) -> list[dict[str, Any]]:
    """Read every choice of one request; none when its part is not there."""
    rows: list[dict[str, Any]] = []
    try:
        for part in parts:
            for table in _groups(store, job_id, part, {index}, GROUPS_MAX):
                keep = pc.and_(
                    pc.equal(table["request_index"], index), pc.equal(table["status"], "succeeded")
                )
                rows += table.filter(keep).to_pylist()
    except (OSError, StoreError, pa.ArrowException) as error:
        log.warning("part not readable", extra={"job_id": job_id.hex, "error": str(error)})
    return rows


def _candidates(conn: Conn, job_id: UUID) -> list[Candidate]:
    rows = conn.execute(
        """
        SELECT request_index, custom_id, spec FROM (
            SELECT request_index, custom_id, spec, state,
                sum(pg_column_size(spec)) OVER (ORDER BY request_index) AS size
            FROM (
                SELECT request_index, custom_id, spec, state FROM requests
                WHERE job_id = %s ORDER BY request_index LIMIT %s
            ) AS first
        ) AS looked_at
        WHERE state = 'succeeded' AND size <= %s
        """,
        [job_id, LOOKED_AT_MAX, SPEC_CHARS_MAX],
    )
    return [
        Candidate(row["request_index"], row["custom_id"], spec_from_json(row["spec"]))
        for row in rows
    ]


def _counterparts(
    conn: Conn, job_id: UUID, sought: Sequence[Candidate], total: int
) -> list[Candidate]:
    """Find requests with the prompts of these, at their places in other equal parts of the Job."""
    places = _places([item.index for item in sought], total)
    if not places:
        return []
    rows = conn.execute(
        """
        SELECT request_index, custom_id, spec FROM (
            SELECT request_index, custom_id, spec,
                sum(pg_column_size(spec)) OVER (ORDER BY request_index) AS size
            -- One by one: for a list of places Postgres may read the whole Job and choose then.
            FROM unnest(%s::integer[]) AS sought (place) CROSS JOIN LATERAL (
                SELECT request_index, custom_id, spec, state FROM requests
                WHERE job_id = %s AND request_index = sought.place LIMIT 1
            ) AS found
            WHERE state = 'succeeded'
        ) AS looked_at
        WHERE size <= %s AND spec -> 'prompt_token_ids' = ANY(%s::jsonb[])
        """,
        [
            places,
            job_id,
            SPEC_CHARS_MAX,
            [Jsonb(list(item.spec.prompt_token_ids)) for item in sought],
        ],
    )
    return [
        Candidate(row["request_index"], row["custom_id"], spec_from_json(row["spec"]))
        for row in rows
    ]


def _places(indices: Sequence[int], total: int) -> list[int]:
    """List where these requests come again if the Job repeats itself, fewest repeats first."""
    found: dict[int, None] = {}
    for parts in range(2, REPEATS_MAX + 1):
        if total % parts:
            continue
        for part in range(1, parts):
            for index in indices:
                place = (index + part * total // parts) % total
                if place >= LOOKED_AT_MAX:
                    found[place] = None
    return list(found)[:PROBES_MAX]


def _is_one_sided(group: Sequence[Candidate]) -> bool:
    return len({item.is_baseline for item in group}) == 1


def _what_is_equal(spec: RequestSpec) -> Shared:
    """Give what a steered request and its baseline share."""
    return spec.prompt_token_ids, spec.sampling


def _first_choices(table: pa.Table, indices: set[int]) -> dict[int, dict[str, Any]]:
    """Pick choice 0 of these requests out of a row group."""
    keep = pc.and_(
        pc.is_in(table["request_index"], pa.array(sorted(indices), pa.int64())),
        pc.equal(table["choice_index"], 0),
    )
    return {row["request_index"]: row for row in table.filter(keep).to_pylist()}


def _groups(
    store: ObjectStore, job_id: UUID, part: Part, indices: set[int], groups_max: int
) -> Iterable[pa.Table]:
    """Read those row groups of a part that can hold the requests, a few columns of each."""
    source = StoredFile(store, job_key(job_id, part.path), part.bytes)
    with pq.ParquetFile(pa.PythonFile(source, mode="r"), pre_buffer=True) as parquet:
        left = groups_max
        for number in range(parquet.num_row_groups):
            facts = parquet.metadata.row_group(number).column(0).statistics
            known = facts is not None and facts.has_min_max
            if left <= 0:
                return
            if known and not any(facts.min <= index <= facts.max for index in indices):
                continue
            left -= 1
            yield parquet.read_row_group(number, columns=COLUMNS, use_threads=False)


def _version(item: Candidate | None, texts: dict[int, dict[str, Any]]) -> Version | None:
    row = None if item is None else texts.get(item.index)
    if item is None or row is None or row["text"] is None:
        return None
    text: str = row["text"]
    return Version(
        item.index,
        item.custom_id,
        steering_in_words(item.spec),
        text[:TEXT_CHARS_MAX],
        row["finish_reason"],
        len(text) > TEXT_CHARS_MAX,
    )


def _prompt(spec: RequestSpec) -> str:
    if spec.prompt is not None:
        return spec.prompt
    shown = ", ".join(map(str, spec.prompt_token_ids[:24]))
    more = ", …" if len(spec.prompt_token_ids) > 24 else ""
    return f"token ids {shown}{more}"
