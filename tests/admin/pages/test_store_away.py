"""Pages that read parts, while the object store cannot be reached: shown without the texts."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.admin.sample_texts import Candidate, Part, read_samples, read_text
from app.completions.spec import RequestSpec, Sampling
from app.jobs.claims import finish_shard
from app.jobs.records import Job, PublishedPart
from app.kit.ids import new_uuid, public_id
from app.results.paths import results_path
from app.storage import ObjectStore, StoreError
from tests.admin.people import Dashboard
from tests.fixtures.away import store_away
from tests.fixtures.builders import Builders, succeeded
from tests.fixtures.parts import part_file

PARTS = [Part(results_path(first, 1), 1000, first, first + 8) for first in (0, 8, 16)]
__all__ = ["store_away"]


def test_a_store_that_is_away_is_asked_once_and_not_for_every_part(
    store_away: ObjectStore, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(StoreError):
        store_away.get_range("jobs/x", 0, 1)
    chosen = Candidate(0, None, RequestSpec((1, 2), None, Sampling()))
    assert read_samples(store_away, new_uuid(), [(chosen, None)], PARTS) == []
    assert [record.message for record in caplog.records] == ["store not readable"]
    assert read_text(store_away, new_uuid(), PARTS, 0) == []
    assert len(caplog.records) == 2


@pytest.fixture
def without_store(dashboard: Dashboard, store_away: ObjectStore) -> Iterator[Dashboard]:
    """The dashboard while its object store cannot be reached."""
    state = dashboard.app.state
    there, state.store = state.store, store_away
    yield dashboard
    state.store = there


@pytest.fixture
def job(dashboard: Dashboard) -> Job:
    """A Job with one published part."""
    builders = Builders(dashboard.database)
    made = builders.a_job(requests=4)
    lease = builders.a_lease()
    file = replace(part_file(0, 4, lease.lease_token), bytes=1000)  # so many are worth a read
    with dashboard.database.transaction() as conn:
        assert finish_shard(conn, lease, succeeded(list(range(4))), PublishedPart((file,)))
    return made


def test_pages_are_shown_while_the_store_is_away(without_store: Dashboard, job: Job):
    browser = without_store.browser("read-only")
    path = f"/admin/jobs/{public_id('job', job.id)}"
    for tail in ("", "/samples", "/requests/0", "/files"):
        assert browser.get(f"{path}{tail}").status_code == 200, tail


def test_a_download_while_the_store_is_away_is_told_so_on_a_page(
    without_store: Dashboard, job: Job
):
    browser = without_store.browser("read-only")
    page = browser.get(f"/admin/jobs/{public_id('job', job.id)}/files")
    link = re.search(r'href="(/admin/jobs/[^"]+\.parquet)"', page.text)
    assert link is not None, page.text
    answer = browser.get(link[1])
    assert answer.status_code == 503
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["retry-after"] == "2"
    assert "content-disposition" not in answer.headers
    assert "The object store, which keeps the files of Jobs, cannot be reached" in answer.text
    assert "Something went wrong" not in answer.text
