"""A service whose alarms are looked at: real rows, scraped through its own /metrics."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from app import metrics
from app.jobs.records import WorkerIdentity
from app.jobs.workers import worker_proved
from app.kit.db import Database
from app.reconcile.samples import take_sample
from app.reconcile.steps import audit
from tests.admin.people import Dashboard
from tests.fixtures.builders import Builders
from tests.metrics.promql import Samples, Scrape, duration, fires
from tests.rules.source_tree import ROOT

RULES = ROOT / "deploy" / "alerts.yaml"
EVERY_SECONDS = 15  # between two scrapes
LONG_SECONDS = 20 * 60  # longer than any rule waits


def rules() -> list[dict[str, Any]]:
    """Read the rules as Prometheus does."""
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def alarms(history: list[Scrape]) -> set[str]:
    """Name the alerts that fire at some time of a history."""
    return {
        rule["alert"]
        for rule in rules()
        if fires(rule["expr"], duration(rule.get("for", "0s")), history)
    }


def steady(samples: Samples) -> list[Scrape]:
    """A history in which nothing changes, longer than any rule waits."""
    return [Scrape(at, samples) for at in range(0, LONG_SECONDS, EVERY_SECONDS)]


def read_page(text: str) -> Samples:
    """Read a page of metrics; Prometheus adds that it got it."""
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return {**found, ("up", frozenset({("job", "tiller")})): 1.0}


def samples_of(app: FastAPI) -> Samples:
    """Scrape an API as Prometheus on its machine does."""
    client = TestClient(app, client=("127.0.0.1", 5000))
    answer = client.get("/metrics")
    assert answer.status_code == 200
    return read_page(answer.text)


@dataclass
class Watched:
    """A service that is well: a Job waits, a worker is ready, the reconciler was there."""

    dashboard: Dashboard
    worker: WorkerIdentity

    @property
    def database(self) -> Database:
        """The one truth."""
        return self.dashboard.database

    @property
    def builders(self) -> Builders:
        """Makes more of everything."""
        return Builders(self.database)

    def execute(self, query: Any, *values: Any) -> None:
        """Change rows as no part of the service would."""
        with self.database.transaction() as conn:
            conn.execute(query, list(values))

    def run(self, *works: Any) -> None:
        """Do something in a transaction each."""
        for work in works:
            self.database.run(work)

    def samples(self) -> Samples:
        """Scrape now."""
        return samples_of(self.dashboard.app)

    def alarms(self) -> set[str]:
        """Name the alerts that fire when everything stays as it is now."""
        return alarms(steady(self.samples()))

    def alarms_of(self, histories: Iterable[Scrape]) -> set[str]:
        """Name the alerts that fire in a history that is made scrape by scrape."""
        return alarms(list(histories))


@pytest.fixture
def watched(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A service that is well, and whose page of metrics is never older than a question."""
    monkeypatch.setattr(metrics, "KEPT_SECONDS", 0.0)
    with dashboard.database.transaction() as conn:
        conn.execute("DELETE FROM samples")
    builders = Builders(dashboard.database)
    builders.a_job(requests=3)
    worker = builders.a_worker()
    dashboard.database.run(lambda conn: worker_proved(conn, worker.worker_id, "passed"))
    take_sample(dashboard.database)
    audit(dashboard.database)
    return Watched(dashboard, worker)
