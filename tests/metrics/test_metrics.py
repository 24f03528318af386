"""GET /metrics: who may read it, what it counts, and that no id or secret becomes a label."""

import re

import psycopg
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from app.main import create_app
from app.reconcile.samples import take_sample
from app.reconcile.steps import audit
from tests.fixtures.api import Api, a_key, settings_for
from tests.fixtures.away import store_away

__all__ = ["store_away"]

TOKEN = "a token for tests only"
ID = re.compile(r"[0-9a-f]{8}")


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def scraped(database, database_url, redis_url, tmp_path):
    """The API with a metrics token; gives a client and what a scrape says."""
    settings = settings_for(
        tmp_path, database_url=database_url, redis_url=redis_url, metrics_token=TOKEN
    )
    _, key = a_key(database)
    with TestClient(create_app(settings), headers={"authorization": f"Bearer {key}"}) as client:
        api = Api(client, database, _, key)

        def scrape() -> dict:
            client.app.state.metrics  # noqa: B018 (it exists before the first request)
            answer = client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain")
            return samples(answer.text)

        yield api, scrape


def test_requests_are_counted_by_template_and_status(scraped):
    api, scrape = scraped
    job = api.submit().json()["id"]
    for path in (f"/v1/jobs/{job}", f"/v1/jobs/{job}", "/v1/jobs/job_" + "0" * 32, "/nowhere/at"):
        api.client.get(path)
    found = scrape()

    def count(route: str, status: str) -> float:
        labels = (("method", "GET"), ("route", route), ("status", status))
        return found["tiller_http_requests_total", labels]

    assert count("/v1/jobs/{job_id}", "200") == 2
    assert count("/v1/jobs/{job_id}", "404") == 1
    assert count("none", "404") == 1
    seconds = (("method", "GET"), ("route", "/v1/jobs/{job_id}"))
    assert found["tiller_http_request_duration_seconds_count", seconds] == 3


def test_no_label_holds_an_id(scraped):
    api, scrape = scraped
    job = api.submit(metadata={"who": "somebody"}).json()["id"]
    api.client.get(f"/v1/jobs/{job}/files/results/part-0000000.1.parquet")
    api.client.get(f"/v1/jobs/{job}/manifest")
    for _, labels in scrape():
        assert not [value for _, value in labels if ID.search(value)]


def test_jobs_queues_tokens_and_invariants_are_told(scraped):
    api, scrape = scraped
    api.submit({"prompt": "hi", "max_tokens": 3}, {"prompt": "ho", "max_tokens": 3})
    take_sample(api.database)
    audit(api.database)
    found = scrape()
    assert found["tiller_jobs", (("state", "queued"),)] == 1
    assert found["tiller_queue_requests_pending", (("model", "tiny"),)] == 2
    assert found["tiller_queue_oldest_job_seconds", (("model", "tiny"),)] >= 0
    assert found["tiller_requests_open", ()] == 2
    with api.database.transaction() as conn:
        row = conn.execute("SELECT sum(held)::bigint AS held FROM accounts").fetchone()
    assert found["tiller_tokens_held", ()] == row["held"] > 0
    assert found["tiller_tokens_granted", ()] == found["tiller_tokens_balance", ()] == 1_000_000
    assert found["tiller_tokens_charged_total", ()] == 0
    assert found["tiller_reconciler_idle_seconds", ()] < 60
    assert found["tiller_invariant_violations", (("rule", "L1"),)] == 0
    assert found["tiller_part_up", (("part", "postgres"),)] == 1
    assert found["tiller_part_up", (("part", "redis"),)] == 1
    assert found["tiller_part_up", (("part", "object_store"),)] == 1


def test_a_store_that_is_away_is_told(scraped, store_away):
    api, scrape = scraped
    api.client.app.state.store = store_away
    assert scrape()["tiller_part_up", (("part", "object_store"),)] == 0
    assert api.client.get("/readyz").json()["checks"]["object_store"] == "down"


def test_a_broken_rule_and_a_late_lease_are_seen(scraped):
    api, scrape = scraped
    api.submit()
    with api.database.transaction() as conn:
        conn.execute("UPDATE accounts SET balance = balance + 1")
        conn.execute(
            """
            UPDATE shards SET state = 'leased', lease_token = 1, worker_id = gen_random_uuid(),
                leased_at = now(), lease_expires_at = now() - interval '90 seconds'
            """
        )
    audit(api.database)
    found = scrape()
    broken = {
        labels
        for (name, labels), value in found.items()
        if name == "tiller_invariant_violations" and value > 0
    }
    assert broken
    assert found["tiller_accounts_stopped", (("by", "ledger"),)] == 1
    assert found["tiller_lease_overdue_seconds", ()] >= 90


def test_with_a_token_nobody_reads_without_it(scraped):
    api, _ = scraped
    for sent in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
        answer = api.client.get("/metrics", headers=sent)
        assert answer.status_code == 404
        assert "tiller_" not in answer.text


@pytest.mark.parametrize(
    ("address", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.77.0.3", 404), ("what", 404)]
)
def test_without_a_token_only_this_machine_reads(
    database_url, redis_url, tmp_path, address, status
):
    settings = settings_for(tmp_path, database_url=database_url, redis_url=redis_url)
    with TestClient(create_app(settings), client=(address, 5000)) as client:
        assert client.get("/metrics").status_code == status


def test_while_postgres_is_away_the_page_says_so(redis_url, tmp_path):
    away = "postgresql://nobody@127.0.0.1:1/none"
    settings = settings_for(tmp_path, database_url=away, redis_url=redis_url)
    with TestClient(create_app(settings), client=("127.0.0.1", 5000)) as client:
        client.app.state.database._pool.timeout = 0.5
        found = samples(client.get("/metrics").text)
    assert found["tiller_part_up", (("part", "postgres"),)] == 0
    assert ("tiller_jobs", ()) not in found


def test_an_api_that_is_newer_than_the_schema_is_not_ready(database_url, redis_url, tmp_path):
    settings = settings_for(tmp_path, database_url=database_url, redis_url=redis_url)

    def checked(revision: str) -> str:
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute("UPDATE alembic_version SET version_num = %s", [revision])
        return client.get("/readyz").json()["checks"]["schema"]

    with TestClient(create_app(settings)) as client:
        assert client.get("/readyz").json()["checks"]["schema"] == "ok"
        assert "migrate" in checked("0003")
        assert checked("0999_of_later_code") == "ok"
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute("DROP TABLE alembic_version")
        answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "migrate" in answer.json()["checks"]["schema"]
