"""Rates and places as a client of the whole service meets them, the openai SDK among them."""

import time
from collections.abc import Iterator

import openai
import pytest
import redis

from app.accounts.rate import Rate
from app.settings import Limits
from tests.completions_api.served import Served, api_beside
from tests.faults.cluster import running_cluster
from tests.faults.stub_engine import HANGS

PER_MINUTE = 3
PLACES = 2
LIMITS = Limits(completions_per_minute=PER_MINUTE, completions_waiting_key=PLACES)
WAIT_SECONDS = 2


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Served]:
    """A cluster with a stub worker whose keys may ask little."""
    folder = tmp_path_factory.mktemp("rates")
    with (
        running_cluster(folder, settings={"limits": LIMITS}) as cluster,
        api_beside(cluster) as served,
    ):
        cluster.start_workers(1)
        yield served


@pytest.fixture
def served(shared) -> Served:
    """The same, with nothing counted yet."""
    with redis.Redis.from_url(shared.cluster.settings.redis_url) as client:
        client.flushall()
    return shared


def use_up(served: Served) -> None:
    """Make the window full, so that its oldest request leaves it in WAIT_SECONDS."""
    for _ in range(PER_MINUTE):
        assert served.complete().status_code == 200
    with redis.Redis.from_url(served.cluster.settings.redis_url) as client:
        (name,) = client.keys(f"tiller:rate:*{Rate.completions}*")
        client.lset(name, -1, time.time() - 60 + WAIT_SECONDS)


def test_the_openai_sdk_waits_as_it_is_told_and_succeeds(served):
    use_up(served)
    key = served.client.headers["authorization"].removeprefix("Bearer ")
    client = openai.OpenAI(base_url=f"{served.client.base_url}/v1", api_key=key, max_retries=2)
    raw = client.completions.with_raw_response.create(model="tiny", prompt=[6, 7], max_tokens=2)
    assert raw.retries_taken == 1
    assert raw.parse().choices[0].text
    assert raw.headers["x-ratelimit-limit-requests"] == str(PER_MINUTE)
    assert raw.headers["x-ratelimit-remaining-requests"] == "0"


def test_the_openai_sdk_raises_its_rate_limit_error_when_it_may_not_retry(served):
    use_up(served)
    key = served.client.headers["authorization"].removeprefix("Bearer ")
    client = openai.OpenAI(base_url=f"{served.client.base_url}/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.RateLimitError, match="within the last minute") as refused:
        client.completions.create(model="tiny", prompt=[6, 7], max_tokens=2)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] in ("1", "2")


def test_a_key_waits_for_so_many_completions_at_once(served):
    waiting = [served.begin(prompt=[HANGS, 6]) for _ in range(PLACES)]

    def limit(name: str) -> int:
        found = served.client.get("/v1/limits").json()["data"]
        return next(item["in_use"] for item in found if item["id"] == name)

    served.cluster.wait(lambda: limit("completions_waiting_key") == PLACES, "both to wait")
    held = PLACES * (2 + 4)
    served.cluster.wait(lambda: served.balance()[1] == held, "both Holds")
    answer = served.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) <= 120
    assert limit("completions_per_minute") == PER_MINUTE
    assert served.balance()[1] == held
    (worker,) = served.cluster.workers
    worker.send(9)
    assert {pending.answer().status_code for pending in waiting} == {503}
    assert limit("completions_waiting_key") == 0
