"""The alert rules speak of metrics that exist, and operations.md of every rule."""

import re

import yaml

from app.reconcile.samples import take_sample
from app.reconcile.steps import audit
from tests.metrics.test_metrics import scraped  # noqa: F401 (a fixture)
from tests.rules.source_tree import ROOT

RULES = ROOT / "deploy" / "alerts.yaml"


def rules() -> list[dict]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def test_every_rule_is_explained_with_what_to_do():
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| (Tiller\w+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, _, _ in explained] == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_every_metric_of_a_rule_is_served(scraped):  # noqa: F811
    api, _ = scraped
    api.submit()
    take_sample(api.database)
    audit(api.database)
    text = api.client.get(
        "/metrics", headers={"authorization": "Bearer a token for tests only"}
    ).text
    served = set(re.findall(r"^# HELP (\w+)", text, re.MULTILINE))
    for rule in rules():
        used = set(re.findall(r"\btiller_\w+", rule["expr"]))
        assert used <= served, f"{rule['alert']}: {used - served}"
