"""Activation patching in two Jobs: rows that one captured are written by requests of the other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from app.completions.spec import RequestSpec, spec_from_json
from app.jobs.claims import finish_shard, load_work
from app.jobs.records import RequestResult
from app.jobs.states import RequestState
from app.steering.spec import Op
from app.steering.vectors import Vector
from tests.checker import check_everything
from tests.fixtures.api import Api
from tests.fixtures.builders import Builders
from tests.fixtures.tiny_model import HIDDEN_SIZE, N_LAYERS
from tests.results.samples import open_part
from worker.outcomes import CaptureRows, Choice, Succeeded, Work

GENERATED = 3
CLEAN = [0, 10, 20, 30]
ROWS = len(CLEAN) + GENERATED - 1

Rows = dict[int, npt.NDArray[np.float32]]


def run_source(api: Api, builders: Builders, folder: Path, **fields: Any) -> tuple[str, Rows]:
    """Submit a Job that captures every layer and publish made-up rows of its one request."""
    request = {"prompt": CLEAN, "max_tokens": GENERATED, "custom_id": "clean", **fields}
    answer = api.submit({"output_residual_stream": True, **request})
    assert answer.status_code == 202, answer.text
    shard = builders.a_lease(builders.a_worker(model_revision="revision-1"))
    with api.database.transaction() as conn:
        (row,) = load_work(conn, shard)
    work = Work(row.request_index, row.custom_id, spec_from_json(row.spec))
    rng = np.random.default_rng(1)
    layers = {
        layer: rng.standard_normal((ROWS, HIDDEN_SIZE)).astype("f4") for layer in range(N_LAYERS)
    }
    positions = np.arange(ROWS, dtype=np.int32)
    captured = CaptureRows("residual_stream", "float32", layers, positions)
    choice = Choice(0, "text", tuple(range(40, 40 + GENERATED)), "length")
    store = api.client.app.state.store  # type: ignore[attr-defined]
    writer = open_part(shard, store, folder)
    writer.add(work, Succeeded((choice,), (captured,), started_at=1.0, finished_at=2.0))
    result = RequestResult(
        request_index=0, state=RequestState.succeeded, completion_tokens=GENERATED
    )
    with api.database.transaction() as conn:
        assert finish_shard(conn, shard, [result], writer.close())
    return answer.json()["id"], layers


def patch(job: str, layer: int, position: int, **fields: Any) -> dict[str, Any]:
    """A request that writes one captured row where it was read."""
    source = {"job": job, "request_index": 0, "layer": layer, "positions": [position], **fields}
    return {
        "prompt": [0, 11, 21, 31],
        "max_tokens": 1,
        "interventions": [{"op": "replace", "layers": [layer], "from": source}],
    }


def stored_specs(api: Api, job: str) -> list[RequestSpec]:
    """Read what the requests of a Job were stored as."""
    with api.database.transaction() as conn:
        rows = conn.execute(
            "SELECT spec FROM requests WHERE job_id = %s ORDER BY request_index", (job[4:],)
        ).fetchall()
    return [spec_from_json(row["spec"]) for row in rows]


def test_a_heat_map_of_layers_and_positions_writes_the_captured_rows(
    api: Api, builders: Builders, tmp_path: Path
) -> None:
    source, rows = run_source(api, builders, tmp_path / "spool")
    cells = [(layer, position) for layer in range(N_LAYERS) for position in range(len(CLEAN))]
    answer = api.submit(*(patch(source, layer, position) for layer, position in cells))
    assert answer.status_code == 202, answer.text
    specs = stored_specs(api, answer.json()["id"])
    for (layer, position), spec in zip(cells, specs, strict=True):
        (item,) = spec.interventions
        assert (item.op, item.layer, item.row) == (Op.replace, layer, 0)
        assert item.positions == (position,)
        row = rows[layer][position : position + 1]
        assert item.vector == Vector("float32", row.shape, row.tobytes()).name
    assert api.numbers()["vectors"] == len(cells)
    names = {spec.interventions[0].vector for spec in specs}
    content = api.client.get(f"/v1/steering_vectors/{names.pop()}/content")
    assert content.status_code == 200
    with api.database.transaction() as conn:
        linked = conn.execute("SELECT count(*) AS n FROM job_vectors").fetchone()
    assert linked is not None
    assert linked["n"] == len(cells)
    check_everything(api.database)


def test_rows_may_go_to_other_positions_and_be_shared_by_defaults(
    api: Api, builders: Builders, tmp_path: Path
) -> None:
    source, rows = run_source(api, builders, tmp_path / "spool")
    taken = {"job": source, "custom_id": "clean", "layer": 2, "positions": [ROWS - 1, 1]}
    item = {"op": "replace", "layers": [0, 3], "from": taken, "at": {"positions": [1, 2]}}
    answer = api.submit(*[{"prompt": CLEAN}] * 20, defaults={"interventions": [item]})
    assert answer.status_code == 202, answer.text
    values = rows[2][[ROWS - 1, 1]]
    name = Vector("float32", values.shape, values.tobytes()).name
    for spec in stored_specs(api, answer.json()["id"]):
        assert [
            (part.layer, part.vector, part.row, part.positions) for part in spec.interventions
        ] == [
            (0, name, 0, (1, 2)),
            (3, name, 0, (1, 2)),
        ]
    assert api.numbers()["vectors"] == 1


def test_what_cannot_be_had_is_said_for_every_request(
    api: Api, builders: Builders, tmp_path: Path
) -> None:
    source, _ = run_source(api, builders, tmp_path / "spool")
    waiting = api.submit({"prompt": CLEAN, "output_residual_stream": True}).json()["id"]
    other = {"authorization": f"Bearer {api.as_other()}"}
    before = api.numbers()
    cases = {
        "has not finished": patch(waiting, 0, 0),
        "does not exist": patch(source, 0, 0, request_index=1),
        f"ran positions 0 to {ROWS - 1}": patch(source, 0, 60),
        "no rows of mlp_out": patch(source, 0, 0, site="mlp_out"),
        "no Job": patch("job_" + "0" * 32, 0, 0),
    }
    answer = api.submit(*cases.values())
    error = answer.json()["error"]
    assert (answer.status_code, error["total"]) == (400, len(cases))
    for (says, _), detail in zip(cases.items(), error["details"], strict=True):
        assert detail["param"] == "interventions"
        assert says in detail["message"]
    foreign = api.submit(patch(source, 0, 0), headers=other)
    assert foreign.status_code == 400
    assert "no Job" in foreign.json()["error"]["message"]
    assert api.numbers() == before


def test_a_job_may_not_copy_more_than_the_limit(
    api: Api, builders: Builders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = run_source(api, builders, tmp_path / "spool")
    captured = api.client.app.state.captured  # type: ignore[attr-defined]
    small = replace(captured._limits, bytes_max=4 * HIDDEN_SIZE)
    monkeypatch.setattr(captured, "_limits", small)
    assert api.submit(patch(source, 0, 0)).status_code == 202
    answer = api.submit(patch(source, 0, 0), patch(source, 0, 1))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "captured_rows_too_large"


def test_stored_vectors_are_found_wherever_a_request_names_them(api: Api) -> None:
    row = [1.0] * HIDDEN_SIZE
    names = [
        api.client.post("/v1/steering_vectors", json={"activations": [x * k for x in row]}).json()[
            "id"
        ]
        for k in (1, 2, 3, 4, 5)
    ]
    request = {
        "prompt": CLEAN,
        "apply_steering_vectors": [{"vector": names[0], "layer_indices": [0]}],
        "interventions": [
            {"op": "add", "layers": [1], "vector": names[1]},
            {"op": "cap", "layers": [2, 3], "max": 1.0, "vectors": [names[2], row]},
        ],
        "captures": [{"name": "p", "layers": [0], "reduce": {"project": [names[3], names[4]]}}],
    }
    answer = api.submit(request)
    assert answer.status_code == 202, answer.text
    with api.database.transaction() as conn:
        linked = conn.execute("SELECT encode(digest, 'hex') AS name FROM job_vectors").fetchall()
    assert {f"sv_{item['name']}" for item in linked} == set(names)
    for name in names:
        assert api.client.delete(f"/v1/steering_vectors/{name}").status_code == 409
