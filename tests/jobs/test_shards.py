"""Cutting Jobs into shards: every request in exactly one, by work and by size."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from app.jobs.shards import Size, plan_groups, plan_shards
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


@given(
    st.lists(st.builds(Size, st.floats(0.1, 10_000), st.integers(0, 10**8)), max_size=300),
    st.integers(1, 64),
)
def test_groups_begin_at_multiples_of_their_size_and_hold_what_a_part_can(
    sizes: list[Size], batch_max: int
) -> None:
    group = min(SETTINGS.reproducible_group_requests, batch_max)
    groups = plan_groups(sizes, SETTINGS, batch_max=batch_max)
    assert [index for first, end in groups for index in range(first, end)] == [*range(len(sizes))]
    assert {*range(0, len(sizes), group)} <= {first for first, _ in groups}
    for first, end in groups:
        assert first // group == (end - 1) // group
        inside = sizes[first:end]
        assert len(inside) == 1 or sum(s.part_bytes for s in inside) <= SETTINGS.shard_bytes


@given(st.lists(SIZES, min_size=1, max_size=200), st.data())
def test_groups_before_and_after_a_block_do_not_depend_on_what_is_in_it(
    sizes: list[Size], data: st.DataObject
) -> None:
    block = data.draw(st.integers(0, (len(sizes) - 1) // 32))
    changed = [
        Size(size.tokens * 9, data.draw(st.integers(0, 10**9))) if index // 32 == block else size
        for index, size in enumerate(sizes)
    ]

    def outside(what: list[Size]) -> list[tuple[int, int]]:
        groups = plan_groups(what, SETTINGS, batch_max=64)
        return [group for group in groups if group[0] // 32 != block]

    assert outside(sizes) == outside(changed)


def test_work_and_speed_do_not_cut_groups() -> None:
    sizes = [Size(1e9, 10)] * 70
    assert plan_groups(sizes, SETTINGS, batch_max=64) == [(0, 32), (32, 64), (64, 70)]
    assert plan_groups(sizes, SETTINGS, batch_max=50) == [(0, 32), (32, 64), (64, 70)]
    assert plan_groups(sizes[:20], SETTINGS, batch_max=16) == [(0, 16), (16, 20)]
