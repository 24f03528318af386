"""Completions through the whole service with the stub engine: answers, charges and endings."""

import signal

import httpx
import pytest

from tests.completions_api.served import BALANCE, api_beside
from tests.faults.cluster import running_cluster
from tests.faults.stub_engine import DIES, FAILS, HANGS
from worker.failpoints import KILLED

PROMPT = [6, 7, 8]


def test_a_completion_is_answered_and_charged_what_it_used(served):
    served.cluster.start_workers(1)
    answer = served.complete(return_token_ids=True)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert choice["prompt_token_ids"] == PROMPT
    generated = len(choice["token_ids"])
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": generated,
        "total_tokens": 3 + generated,
    }
    assert answer.headers["x-request-id"].startswith("req_")
    assert served.balance() == (BALANCE - 3 - generated, 0)
    usage = served.client.get("/v1/usage").json()
    assert usage["charged"] == 3 + generated
    assert usage["granted"] - usage["charged"] == usage["balance"]
    (row,) = served.cluster.rows("SELECT spec FROM completions")
    assert row["spec"] is None, "the prompt is forgotten"


def test_several_prompts_give_choices_in_order(served):
    served.cluster.start_workers(1)
    prompts = [[6, 7], [8, 9, 10], [11]]
    answer = served.complete(prompt=prompts, return_token_ids=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    assert answer["usage"]["prompt_tokens"] == 6
    (alone,) = served.complete(prompt=prompts[1]).json()["choices"]
    assert alone["text"] == answer["choices"][1]["text"]


def test_a_worker_that_drains_a_job_answers_completions_meanwhile(served):
    served.cluster.start_workers(1, STUB_SECONDS="0.25")
    job = served.cluster.a_job(requests=400, shard_size=16)
    served.cluster.wait_busy()
    assert served.complete().status_code == 200
    assert served.cluster.job(job).finished_at is None
    served.cluster.wait_finished(job)


def test_a_request_that_fails_in_the_engine_is_told_and_released(served):
    served.cluster.start_workers(1)
    answer = served.complete(prompt=[FAILS, 6])
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "steering_failed"
    assert served.balance() == (BALANCE, 0)
    assert served.states() == ["errored"]


def test_no_worker_is_503_and_holds_nothing(served):
    answer = served.complete()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_worker"
    assert int(answer.headers["retry-after"]) > 0
    assert served.states() == []
    assert served.balance() == (BALANCE, 0)


def test_a_dead_broker_is_503_and_the_hold_is_released(served):
    served.cluster.start_workers(1)
    served.cluster.kill_redis()
    answer = served.complete()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "broker_unavailable"
    assert "retry-after" in answer.headers
    assert served.balance() == (BALANCE, 0)
    served.cluster.redis.start()
    served.cluster.wait(lambda: served.complete().status_code == 200, "a Completion again")


def test_an_account_without_tokens_gets_402(served):
    served.cluster.start_workers(1)
    with served.cluster.database.transaction() as conn:
        conn.execute(
            "UPDATE accounts SET held = balance WHERE id = %(id)s", {"id": served.account_id}
        )
    try:
        refused = served.complete()
        assert refused.status_code == 402
        assert refused.json()["error"]["code"] == "insufficient_tokens"
    finally:
        with served.cluster.database.transaction() as conn:
            conn.execute(
                "UPDATE accounts SET held = 0 WHERE id = %(id)s", {"id": served.account_id}
            )
    assert served.states() == []


def test_a_client_that_leaves_is_not_charged_and_frees_its_place(served):
    served.cluster.start_workers(1)
    body = {"model": "tiny", "prompt": [HANGS, 6], "max_tokens": 4}
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/v1/completions", json=body, timeout=2.0)
    served.wait_state("cancelled", seconds=5)
    assert served.balance() == (BALANCE, 0)

    def in_flight() -> int:
        (row,) = served.cluster.rows("SELECT requests_running FROM workers WHERE state = 'ready'")
        return row["requests_running"]

    served.cluster.wait(lambda: in_flight() == 0, "its place in the engine", 5)


def test_a_worker_killed_in_the_middle_is_503_and_the_hold_is_released_once(served):
    served.cluster.start_workers(1)
    pending = served.begin(prompt=[HANGS, 6])
    served.wait_state("running")
    served.cluster.workers[0].send(signal.SIGKILL)
    answer = pending.answer()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_lost"
    assert served.balance() == (BALANCE, 0)
    served.cluster.wait_ready()
    assert served.complete().status_code == 200


def test_a_worker_killed_between_answer_and_charge_costs_nothing(served):
    worker = served.cluster.start_worker(failpoint="completion_answered")
    served.cluster.wait_ready()
    answer = served.complete()
    assert worker.exits == [KILLED]
    assert answer.status_code == 503
    assert served.balance() == (BALANCE, 0)
    assert served.states() == ["errored"]


def test_an_engine_that_dies_is_503_at_once(served):
    served.cluster.start_workers(1)
    answer = served.complete(prompt=[DIES, 6])
    assert answer.status_code == 503
    assert served.balance() == (BALANCE, 0)
    served.cluster.wait(lambda: served.cluster.workers[0].exits, "the worker to start anew")


def test_a_worker_told_to_stop_ends_its_completions_with_503(served):
    served.cluster.start_workers(1, TILLER_SHUTDOWN_SECONDS="1")
    pending = served.begin(prompt=[HANGS, 6])
    served.wait_state("running")
    served.cluster.workers[0].send(signal.SIGTERM)
    answer = pending.answer()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_stopped"
    assert served.balance() == (BALANCE, 0)


def test_a_worker_told_to_stop_before_it_listens_for_jobs_ends_what_it_runs(served):
    served.cluster.start_worker(
        "tests.faults.early_stop_worker", STOP_AT="build_worker", STOP_BUSY="1", STUB_SECONDS="1"
    )
    served.cluster.wait(served.cluster.ready_pids, "a worker that takes Completions")
    answer = served.complete()
    assert answer.status_code == 200, answer.text
    assert served.states() == ["succeeded"]


def test_a_worker_that_stood_still_comes_too_late_and_charges_nothing(served):
    served.cluster.start_workers(1, STUB_SECONDS="2")
    (worker,) = served.cluster.workers
    pending = served.begin()
    served.wait_state("running")
    worker.send(signal.SIGSTOP)
    answer = pending.answer()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
    assert served.balance() == (BALANCE, 0)
    worker.send(signal.SIGCONT)
    assert served.cluster.wait(lambda: served.complete().status_code == 200, "an answer")
    assert served.states()[0] == "errored"
    rows = served.cluster.rows("SELECT tokens_charged FROM completions WHERE state <> 'errored'")
    charged = sum(row["tokens_charged"] for row in rows)
    assert charged == 7
    assert served.balance() == (BALANCE - charged, 0)


def test_a_completion_past_its_deadline_is_503_and_leaves_the_engine(tmp_path):
    settings = {"completion_seconds": 1.5}
    with running_cluster(tmp_path, settings=settings) as cluster, api_beside(cluster) as served:
        cluster.start_workers(1)
        answer = served.complete(prompt=[HANGS, 6])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert served.states() == ["expired"]
        assert served.balance() == (BALANCE, 0)

        def in_flight() -> int:
            (row,) = cluster.rows("SELECT requests_running FROM workers WHERE state = 'ready'")
            return row["requests_running"]

        cluster.wait(lambda: in_flight() == 0, "its place in the engine", 5)
