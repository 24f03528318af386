"""The dose warning on its way: from what a worker measured to a request of a Job."""

from app.catalog.norms import store_norms
from tests.fixtures.tiny_model import HIDDEN_SIZE, N_LAYERS

ROW = [3.0, 4.0, *[0.0] * (HIDDEN_SIZE - 2)]  # norm 5


def test_requests_of_a_job_carry_the_warning_where_norms_are_known(api):
    with api.database.transaction() as conn:
        store_norms(conn, api.client.app.state.catalog.get("tiny"), [5.5] * N_LAYERS)
    steer = {"activations": [ROW], "layer_indices": [2]}
    job = api.submit(
        *[
            {"prompt": "hi", "apply_steering_vectors": [{**steer, "scale": scale}]}
            for scale in (1.0, 1.2, -1.2)
        ],
        {"prompt": [0, 0, 5], "interventions": [{"op": "add", "layers": [1], "vector": ROW}] * 2},
        {
            "prompt": [0, 0, 5],
            "interventions": [{"op": "add", "layers": [1], "vector": ROW, "scale": 2}],
        },
    ).json()

    def warnings(index: int) -> list[str]:
        path = f"/v1/jobs/{job['id']}/requests/{index}"
        return api.client.get(path).json()["spec"].get("warnings", [])

    dose = "dose_above_typical_norm"
    assert [warnings(index) for index in range(5)] == [
        [],
        [dose],
        [dose],
        ["double_bos"],
        ["double_bos", dose],
    ]
