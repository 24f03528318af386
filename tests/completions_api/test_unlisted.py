"""A model that a worker serves and the API does not know: the worker checks, the API passes on."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.completions_api.served import BALANCE, START_SECONDS, Served, api_beside
from tests.completions_api.streams import Stream, opened, streamed
from tests.engine.tiny_model import make_tiny_llama
from tests.faults.cluster import running_cluster
from tests.fixtures.documented import Described
from tiller.tensors import decode

pytestmark = pytest.mark.timeout(900)  # the worker's start on a busy machine counts

HIDDEN, LAYERS, VOCAB = 64, 4, 256
PROMPT = [0, 17, 40, 93]
VECTOR = [1.0, 2.0, 3.0, *[0.0] * (HIDDEN - 3)]
FIELD = "apply_steering_vectors"


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[Served]:
    """A worker whose models.toml has "tiny", and an API whose models.toml has another model."""
    folder = tmp_path_factory.mktemp("unlisted")
    model = make_tiny_llama(folder / "llama", layers=LAYERS, hidden=HIDDEN, vocab=VOCAB)
    table = (
        f'path = "{model}"\ndtype = "float32"\nmax_num_seqs = 4\n'
        "max_num_batched_tokens = 512\nkv_cache_bytes = 67108864\nthreads = 1\n"
    )
    known, served = folder / "known.toml", folder / "served.toml"
    known.write_text(f"[models.other]\n{table}", encoding="utf-8")
    served.write_text(f"[models.tiny]\n{table}", encoding="utf-8")
    settings = {"models_file": known}
    with running_cluster(folder, settings=settings) as cluster:
        cluster.start_worker(
            "worker",
            TILLER_MODELS_FILE=str(served),
            TILLER_LEASE_SECONDS="30",
            TILLER_HEARTBEAT_SECONDS="1",
        )
        cluster.wait_ready(START_SECONDS)
        with api_beside(cluster) as running:
            yield running


@pytest.fixture
def spent(real) -> Iterator[list[int]]:
    """What a test is to be charged in all; nothing stays held."""
    before, charges = real.balance()[0], []
    yield charges
    assert real.balance() == (before - sum(charges), 0)


def complete(real, **fields):
    answer = real.complete(**{"prompt": PROMPT, "temperature": 0, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def last_row(real) -> dict[str, object]:
    (row,) = real.cluster.rows(
        """
        SELECT prompt_tokens, tokens_held, tokens_charged FROM completions
        ORDER BY id DESC LIMIT 1
        """
    )
    return row


def test_it_is_served_without_being_listed(real, spent):
    models = real.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["other"]
    assert real.client.get("/v1/models/tiny").status_code == 404
    answer = complete(real, return_token_ids=True, ignore_eos=True)
    (choice,) = answer["choices"]
    assert (answer["model"], choice["prompt_token_ids"]) == ("tiny", PROMPT)
    assert answer["usage"]["total_tokens"] == 6
    spent.append(6)


def test_the_hold_is_a_bound_and_the_charge_what_ran(real, spent):
    text = "w17 w40 w93"  # 11 bytes; 3 tokens and the BOS that the tokenizer adds
    answer = complete(real, prompt=[text, text], n=2, temperature=1, seed=3, ignore_eos=True)
    assert len(answer["choices"]) == 4
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}
    assert last_row(real) == {
        "prompt_tokens": 8,
        "tokens_held": 2 * 11 + 4 * 2,
        "tokens_charged": 16,
    }
    spent.append(16)


def test_more_tokens_than_bytes_are_charged_at_most_the_hold(real, spent):
    answer = complete(real, prompt="", max_tokens=1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 2, "the BOS and one more"
    assert last_row(real)["tokens_charged"] == 2
    spent.append(2)


def test_it_steers_reads_and_echoes_as_a_listed_model_does(real, spent):
    fields = {"output_residual_stream": [0, 1], "max_tokens": 1}
    plain = complete(real, **fields)
    steered = complete(
        real, **fields, **{FIELD: [{"activations": [VECTOR], "layer_indices": [1], "scale": 2}]}
    )
    before, after = (
        decode(answer["activations"]["residual_stream"]) for answer in (plain, steered)
    )
    assert np.array_equal(before[0], after[0])
    assert np.allclose(after[1] - before[1], 2 * np.array(VECTOR), atol=1e-4)
    echoed = complete(real, prompt="w17 w40", logprobs=1, echo=True)
    assert echoed["choices"][0]["text"].startswith("w17 w40")
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][0] is None
    used = [answer["usage"]["total_tokens"] for answer in (plain, steered, echoed)]
    assert used[:2] == [5, 5]
    spent += used


STREAMED = {
    # Long enough that it cannot all be gathered while one round trip to Redis runs.
    "plain": {"max_tokens": 48, "ignore_eos": True},
    "several choices": {
        "prompt": ["w17 w40", "w93"],
        "n": 2,
        "temperature": 1,
        "seed": 3,
        "return_token_ids": True,
        "ignore_eos": True,
    },
    "logprobs and echo": {
        "prompt": PROMPT,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "echo": True,
        "return_token_ids": True,
    },
    "steered and read": {
        "output_residual_stream": [0, 1],
        "captures": [{"name": "ends", "layers": [2], "at": {"phase": "last"}}],
        FIELD: [{"activations": [VECTOR], "layer_indices": [1], "scale": 2}],
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize("kind", STREAMED)
def test_its_stream_says_what_its_plain_answer_says(real, spent, kind):
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, **STREAMED[kind]}
    plain = complete(real, **fields)
    stream = streamed(
        real, described=Described(real.app), stream_options={"include_usage": True}, **fields
    )
    assert stream.is_done, stream
    assert len({chunk["id"] for chunk in stream.chunks}) == 1
    left_out = ("id", "object", "created")
    assert stream.joined() == {k: v for k, v in plain.items() if k not in left_out}
    if fields["max_tokens"] >= STREAMED["plain"]["max_tokens"]:
        assert len(stream.choices()) > 1, "it came in pieces"
    spent += [plain["usage"]["total_tokens"]] * 2


def test_its_stream_is_refused_by_the_worker_before_it_begins(real, spent):
    stream = streamed(real, output_residual_stream=[LAYERS])
    assert stream.status == 400, stream.body
    assert stream.error is not None
    error = stream.error["error"]
    assert (error["param"], error["code"]) == ("output_residual_stream", "invalid_request")
    assert spent == []


def test_a_client_that_leaves_its_stream_pays_for_what_ran(real):
    before, most = real.balance()[0], 8 * 500
    fields = {"prompt": PROMPT, "n": 8, "max_tokens": 500, "ignore_eos": True}
    with opened(real, Stream(), **fields) as answer:
        next(answer.iter_lines())
    real.wait_state("cancelled", seconds=10)
    balance, held = real.balance()
    assert held == 0
    assert len(PROMPT) < before - balance < len(PROMPT) + most


REFUSED = {
    "a layer too many": (
        {FIELD: [{"activations": [VECTOR], "layer_indices": [LAYERS]}]},
        FIELD,
        "invalid_request",
        f"{LAYERS} layers",
    ),
    "a vector too short": (
        {FIELD: [{"activations": [[1.0]], "layer_indices": [1]}]},
        FIELD,
        "invalid_request",
        "hidden size",
    ),
    "a position out of reach": (
        {FIELD: [{"activations": [[VECTOR]], "layer_indices": [1], "position_indices": [5]}]},
        FIELD,
        "invalid_request",
        "position 5",
    ),
    "a token id too many": ({"prompt": [VOCAB]}, "prompt", "invalid_request", "token id"),
    "a context too long": (
        {"max_tokens": 512},
        "max_tokens",
        "context_length_exceeded",
        "512 tokens",
    ),
    "a field that there is not": ({"best_of": 2}, "best_of", "invalid_request", "best_of"),
    "a read of no layer": ({"output_residual_stream": [9]}, "output_residual_stream", "", "9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_worker_refuses_is_passed_on_and_nothing_is_charged(real, spent, name):
    fields, param, code, part = REFUSED[name]
    answer = real.complete(**{"prompt": PROMPT, "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["code"] == (code or "invalid_request")
    assert part in error["message"]
    assert spent == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": [[]] * 257}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"n": "2"}, "n"),
        ({"n": 100, "prompt": ["a", "b"]}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_no_bound_can_be_told_of_is_refused_before_a_hold(real, spent, fields, param):
    count = len(real.states())
    answer = real.complete(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(real.states()) == count
    assert spent == []


def test_more_than_the_account_has_is_402(real, spent):
    answer = real.complete(max_tokens=BALANCE + 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (402, "insufficient_tokens")
    assert spent == []


def test_a_job_is_refused_because_it_is_not_listed(real, spent):
    body = {"model": "tiny", "requests": [{"prompt": PROMPT}]}
    answer = real.client.post("/v1/jobs", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        *(400, "model", "model_not_listed"),
    )
    body["model"] = "nobody"
    answer = real.client.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = real.complete(model="nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert spent == []


def test_a_worker_measures_the_typical_norms_of_its_model(real):
    (row,) = real.cluster.rows("SELECT model, dtype, norms FROM model_norms")
    assert (row["model"], row["dtype"]) == ("tiny", "float32")
    assert len(row["norms"]) == LAYERS
    stream = decode(
        complete(real, prompt=list(range(3, 60)), output_residual_stream=True)["activations"][
            "residual_stream"
        ]
    )
    for measured, rows in zip(row["norms"], stream, strict=True):
        assert 0.5 < measured / np.median(np.linalg.norm(rows[1:], axis=1)) < 2


def test_a_dose_above_the_typical_norm_is_warned_of(real):
    (row,) = real.cluster.rows("SELECT norms FROM model_norms")
    scale = row["norms"][1] / np.linalg.norm(VECTOR)

    def warnings(factor: float) -> list[str]:
        steer = {"activations": [VECTOR], "layer_indices": [1], "scale": scale * factor}
        return complete(real, **{FIELD: [steer]}).get("warnings", [])

    assert warnings(0.95) == []
    assert warnings(1.05) == ["dose_above_typical_norm"]
