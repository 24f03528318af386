"""How many workers run is a setting: every `docker compose up` of operations.md keeps to it."""

import re

import pytest
import yaml

from tests.containers.test_images import EXAMPLE, config
from tests.rules.source_tree import ROOT


@pytest.mark.parametrize(("line", "workers"), [("TILLER_WORKERS=3", 3), ("", 1)])
def test_compose_starts_as_many_cpu_workers_as_the_setting_says(tmp_path, line, workers):
    lines = [
        x for x in EXAMPLE.read_text(encoding="utf-8").splitlines() if "TILLER_WORKERS" not in x
    ]
    (tmp_path / "env").write_text("\n".join([*lines, line]), encoding="utf-8")
    said = config("--profile", "cpu", env_file=tmp_path / "env")
    assert said.returncode == 0, said.stderr
    service = yaml.safe_load(said.stdout)["services"]["worker-cpu"]
    assert int(service["deploy"]["replicas"]) == workers


def test_no_command_that_operators_are_given_sets_a_number_that_the_next_one_undoes():
    for page in ("docs/operations.md", "README.md", "compose.yaml", "Makefile"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"up\b[^`\n]*--scale", text), page
