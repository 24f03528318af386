"""Cutting Jobs into shards: every request in exactly one, by work and by size."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from app.jobs.shards import Size, plan_shards
from app.settings import Settings

SETTINGS = Settings(
    database_url="postgresql://nowhere/x",
    redis_url="redis://nowhere",
    object_store="file:///nowhere",
    models_file=Path("models.toml"),
    key_pepper="a pepper for tests only",  # type: ignore[arg-type]
)
SIZES = st.builds(Size, st.floats(0.1, 10_000), st.integers(0, 10**9))


@given(st.lists(SIZES, min_size=1, max_size=600), st.floats(1, 10_000))
def test_shards_are_whole_and_within_their_limits(sizes: list[Size], speed: float) -> None:
    shards = plan_shards(sizes, SETTINGS, tokens_per_second=speed)
    assert [first for first, _ in shards] == [0, *(end for _, end in shards[:-1])]
    assert shards[-1][1] == len(sizes)
    for first, end in shards:
        inside = sizes[first:end]
        assert 1 <= len(inside) <= SETTINGS.shard_requests_max
        small = len(inside) <= SETTINGS.shard_requests_min
        assert small or sum(size.tokens for size in inside) <= SETTINGS.shard_seconds * speed
        single = len(inside) == 1
        assert single or sum(size.part_bytes for size in inside) <= SETTINGS.shard_bytes


def test_a_request_that_fills_a_part_gets_its_own_shard() -> None:
    sizes = [Size(1, 10), Size(1, 10**9), Size(1, 10)]
    assert plan_shards(sizes, SETTINGS, tokens_per_second=500) == [(0, 1), (1, 2), (2, 3)]


def test_half_a_minute_of_work_makes_a_shard() -> None:
    sizes = [Size(100, 10)] * 1000
    shards = plan_shards(sizes, SETTINGS, tokens_per_second=500)
    assert {end - first for first, end in shards[:-1]} == {150}
