"""docs/interventions.md and docs/faults.md say what is so: examples are posted, tests exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.completions.rows_of import read_rows_of
from app.completions.spec import RequestSpec
from app.settings import Limits
from app.steering.spec import Op, Reduce, Site
from app.steering.vectors import Vector
from tests.completions.models import a_validator
from tests.fixtures.api import Api, api
from tests.rules.source_tree import ROOT

__all__ = ["api"]

PAGE = (ROOT / "docs" / "interventions.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
STORED = Vector("float32", (8,), np.array([0.5, -1, 0, 2, 0, 0, 1, -0.5], "<f4").tobytes())
N_FAULTS, N_SILENT = 40, 5


def takes_rows_of_another_job(body: dict[str, Any]) -> bool:
    return any("from" in item for item in body.get("interventions", ()))


def test_every_example_is_accepted_by_the_service(api: Api) -> None:
    sent = api.client.post(
        "/v1/steering_vectors", json={"activations": STORED.to_float32().tolist()}
    )
    assert sent.status_code == 201, sent.text
    assert sent.json()["id"] == STORED.name
    bodies = [body for body in EXAMPLES if not takes_rows_of_another_job(body)]
    assert len(bodies) > 10
    answer = api.submit(*bodies)
    assert answer.status_code == 202, answer.text


def test_the_example_that_takes_rows_of_another_job_is_valid(tmp_path: Path) -> None:
    (body,) = filter(takes_rows_of_another_job, EXAMPLES)
    (op,) = body["interventions"]
    longest = Limits().custom_id_chars
    rows = read_rows_of(op["from"], tuple(op["at"]["positions"]), custom_id_chars=longest)
    found = Vector("float32", (1, 8), np.ones(8, "<f4").tobytes())
    (spec,) = a_validator(tmp_path, captured={rows: found}).check([body])
    assert isinstance(spec, RequestSpec), spec
    (item,) = spec.interventions
    assert (item.op, item.vector, item.positions) == (Op.replace, found.name, (4,))


def test_the_examples_show_every_op_site_form_and_reduction() -> None:
    items = [item for body in EXAMPLES for item in body.get("interventions", ())]
    captures = [item for body in EXAMPLES for item in body.get("captures", ())]
    ats = [item["at"] for item in (*items, *captures) if "at" in item]
    reduces = [item["reduce"] for item in captures if "reduce" in item]
    assert {item["op"] for item in items} == set(Op)
    sites = {item["site"] for item in (*items, *captures) if "site" in item}
    assert sites | {"resid_post"} == set(Site)
    assert {key for at in ats for key in at} == {"positions", "spans", "phase", "steps", "exclude"}
    named = {reduce for reduce in reduces if isinstance(reduce, str)} | {"none", "project"}
    assert named == set(Reduce)
    assert any(isinstance(reduce, dict) for reduce in reduces)
    assert {key for item in items for key in item} >= {
        "scale", "norm_match", "coeff", "min", "max", "heads", "vector", "vectors", "from",
    }  # fmt: skip


def test_what_the_page_calls_its_order_is_what_comes_out(tmp_path: Path) -> None:
    (body,) = [body for body in EXAMPLES if "apply_steering_vectors" in body]
    (spec,) = a_validator(tmp_path).check([body])
    assert isinstance(spec, RequestSpec), spec
    assert [item.summed for item in spec.interventions] == [True, False, False]
    assert [item.op for item in spec.interventions] == [Op.add, Op.orthogonal, Op.add]


def test_the_limits_that_the_page_names_are_those_of_the_settings() -> None:
    limits = Limits()
    numbers = (
        limits.interventions_per_request,
        limits.vector_numbers,
        limits.span_positions,
        limits.capture_directions,
    )
    assert numbers == (16, 2_097_152, 4096, 64)
    for number in numbers:
        assert f"{number:,}" in PAGE


def rows_of_faults() -> list[list[str]]:
    table = [line for line in FAULTS.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)


def test_the_page_of_faults_has_each_fault_once_and_says_why_it_cannot_occur() -> None:
    rows = rows_of_faults()
    assert [int(row[0]) for row in rows] == list(range(1, N_FAULTS + 1))
    for row in rows:
        assert len(row) == 4, row
        assert all(len(cell) > 3 for cell in row[1:3]), row
        assert named_tests(row[3]) or "by construction" in row[2], row


def test_each_silent_fault_has_a_test_that_switches_our_protection_off() -> None:
    silent = rows_of_faults()[:N_SILENT]
    assert len(silent) == N_SILENT
    for row in silent:
        names = [name.rsplit("::", 1)[1] for name in named_tests(row[3])]
        assert any(name.startswith("test_with") for name in names), row


@pytest.mark.parametrize("name", sorted(set(named_tests(FAULTS))))
def test_a_named_test_exists(name: str) -> None:
    file, function = name.split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
