"""Pages that read parts, while the object store cannot be reached: shown without the texts."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from obstore.store import S3Store

from app.admin.sample_texts import Candidate, Part, read_samples, read_text
from app.completions.spec import RequestSpec, Sampling
from app.jobs.claims import finish_shard
from app.jobs.records import PublishedPart
from app.kit.ids import new_uuid, public_id
from app.results.paths import results_path
from app.storage import ObjectStore, StoreError
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders, succeeded
from tests.fixtures.parts import part_file

PARTS = [Part(results_path(first, 1), 1000, first, first + 8) for first in (0, 8, 16)]


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    """An object store at an address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens: connections are refused
        yield ObjectStore(
            S3Store(
                "bucket",
                endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}",
                region="us-east-1",
                access_key_id="nobody",
                secret_access_key="nothing",
                client_options={"allow_http": True},
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
            ),
            None,
        )


def test_a_store_that_is_away_is_asked_once_and_not_for_every_part(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(StoreError):
        store.get_range("jobs/x", 0, 1)
    chosen = Candidate(0, None, RequestSpec((1, 2), None, Sampling()))
    assert read_samples(store, new_uuid(), [(chosen, None)], PARTS) == []
    assert [record.message for record in caplog.records] == ["store not readable"]
    assert read_text(store, new_uuid(), PARTS, 0) == []
    assert len(caplog.records) == 2


def test_pages_are_shown_while_the_store_is_away(dashboard: Dashboard, store: ObjectStore):
    builders = Builders(dashboard.database)
    job = builders.a_job(requests=4)
    lease = builders.a_lease()
    file = replace(part_file(0, 4, lease.lease_token), bytes=1000)  # so many are worth a read
    with dashboard.database.transaction() as conn:
        assert finish_shard(conn, lease, succeeded(list(range(4))), PublishedPart((file,)))
    browser = dashboard.browser("read-only")
    path = f"/admin/jobs/{public_id('job', job.id)}"
    state = dashboard.app.state
    there, state.store = state.store, store
    try:
        for tail in ("", "/samples", "/requests/0", "/files"):
            assert browser.get(f"{path}{tail}").status_code == 200, tail
    finally:
        state.store = there
