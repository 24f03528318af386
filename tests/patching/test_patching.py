"""The patching study of the examples, through the whole service, against Hugging Face.

A user's two Jobs over HTTP: API, Postgres, Redis, object store and a worker with vLLM are all real.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from app.main import create_app
from examples.patching import (
    Contrast,
    HeatMap,
    Places,
    UnequalPromptsError,
    read_places,
    show,
    study,
)
from tests.engine.tiny_model import make_tiny_llama
from tests.faults.cluster import running_cluster
from tests.fixtures.api import a_key
from tests.patching.heat_map import Reference, heat_map
from tests.patching.serving import serving
from tests.reference import process
from tiller.client import Client

pytestmark = pytest.mark.timeout(900)  # the worker's start on a busy machine counts

TOLERANCE = 1e-4
LAYERS = 4
BOS = 0
DIFFERENT = 2  # the only position whose tokens differ: those before it have nothing to patch
CLEAN = [BOS, 17, 40, 93, 122, 8, 201, 64]
CORRUPTED = [*CLEAN[:DIFFERENT], 150, *CLEAN[DIFFERENT + 1 :]]
POSITIONS = len(CLEAN)
START_SECONDS = 300.0


@dataclass(frozen=True)
class Studied:
    """What a user has at the end, and what it has to be."""

    folder: Path
    answers: tuple[int, int]
    map: HeatMap
    places: Places
    reference: Reference

    def wanted(self) -> HeatMap:
        """The reference's heat map of the two answers."""
        right, wrong = self.answers
        ours = self.reference
        return HeatMap(
            clean=ours.clean[right] - ours.clean[wrong],
            corrupted=ours.corrupted[right] - ours.corrupted[wrong],
            patched=ours.patched[..., right] - ours.patched[..., wrong],
        )


def words(ids: list[int]) -> str:
    """Write token ids as a prompt; the tokenizer puts the BOS in front."""
    return " ".join(f"w{number}" for number in ids if number != BOS)


@pytest.fixture(scope="module")
def studied(tmp_path_factory) -> Iterator[Studied]:
    """Run the study on a tiny model, served in float32 by one worker."""
    folder = tmp_path_factory.mktemp("patching")
    model = make_tiny_llama(folder / "llama", layers=LAYERS)
    models_file = folder / "served.toml"
    models_file.write_text(
        f'[models.tiny]\npath = "{model}"\ndtype = "float32"\nmax_num_seqs = 32\n'
        "max_num_batched_tokens = 512\nkv_cache_bytes = 67108864\nthreads = 1\n",
        encoding="utf-8",
    )
    environment = {"TILLER_LEASE_SECONDS": "30", "TILLER_HEARTBEAT_SECONDS": "1"}
    with (
        process.start() as pool,
        running_cluster(
            folder, settings={"models_file": models_file}, environment=environment
        ) as cluster,
    ):
        cluster.start_worker("worker")
        reference = heat_map(pool, model, CLEAN, CORRUPTED)
        right, wrong = reference.answers()
        contrast = Contrast(words(CLEAN), words(CORRUPTED), f" w{right}", f" w{wrong}")
        _, key = a_key(cluster.database)
        out = folder / "out"
        cluster.wait_ready(START_SECONDS)
        with (
            serving(create_app(cluster.settings)) as address,
            Client(f"{address}/v1", key) as client,
        ):
            found, places, jobs = study(client, "tiny", contrast, out)
        assert [job["request_counts"]["succeeded"] for job in jobs] == [5, 2 * LAYERS * POSITIONS]
        cluster.check()
        show(found, places, contrast, out)
        yield Studied(out, (right, wrong), found, places, reference)


def test_the_heat_map_equals_that_of_hugging_face(studied: Studied) -> None:
    wanted = studied.wanted()
    assert wanted.clean - wanted.corrupted > 1, "the prompts' answers have to differ"
    assert studied.map.patched.shape == (LAYERS, POSITIONS)
    assert abs(studied.map.clean - wanted.clean) <= TOLERANCE
    assert abs(studied.map.corrupted - wanted.corrupted) <= TOLERANCE
    assert np.abs(studied.map.patched - wanted.patched).max() <= TOLERANCE
    best = np.sort(wanted.recovered, axis=None)
    assert best[-1] - best[-2] > 1e-3, "one cell has to stand out"
    assert studied.map.recovered.argmax() == wanted.recovered.argmax()


def test_both_log_probabilities_of_every_cell_lie_in_the_parquet_files(studied: Studied) -> None:
    columns = ["status", "prompt_token_ids", "steering", "prompt_logprobs", "dtype"]
    rows = pl.read_parquet(studied.folder / "patch" / "results" / "*.parquet", columns=columns)
    seen = set()
    for row in rows.iter_rows(named=True):
        assert (row["status"], row["dtype"]) == ("succeeded", "float32")
        (steer,) = json.loads(row["steering"])
        assert steer["op"] == "replace"
        (position,) = steer["positions"]
        *prompt, answer = row["prompt_token_ids"]
        assert prompt == CORRUPTED
        (scored,) = row["prompt_logprobs"][-1]
        assert scored["token_id"] == answer
        wanted = studied.reference.patched[steer["layer"], position, answer]
        assert abs(scored["logprob"] - wanted) <= TOLERANCE, (steer["layer"], position, answer)
        seen.add((steer["layer"], position, answer))
    assert seen == {
        (layer, position, answer)
        for layer in range(LAYERS)
        for position in range(POSITIONS)
        for answer in studied.answers
    }
    assert rows.height == len(seen)


def test_cells_are_what_causality_makes_them(studied: Studied) -> None:
    found = studied.map
    moved = np.abs(found.patched - found.corrupted) > 100 * TOLERANCE
    assert not moved[:, :DIFFERENT].any(), "both runs have the same rows there"
    assert moved[:-1, DIFFERENT:].all(), "every other row carries the difference on"
    assert not moved[-1, :-1].any(), "no later layer reads them"
    assert abs(found.patched[-1, -1] - found.clean) <= TOLERANCE, "the answer is read from it alone"
    assert moved.mean() > 0.5


@pytest.mark.parametrize("axis", [0, 1], ids=["layer", "position"])
def test_a_heat_map_that_is_off_by_one_would_be_seen(studied: Studied, axis: int) -> None:
    wrong = np.roll(studied.wanted().patched, 1, axis=axis)
    off = np.abs(studied.map.patched - wrong) > 100 * TOLERANCE
    assert off.mean() > 0.4


def test_the_study_leaves_a_table_and_a_plot(studied: Studied) -> None:
    table = pl.read_csv(studied.folder / "patching.csv")
    assert table["layer"].to_list() == list(range(LAYERS))
    assert np.allclose(table.drop("layer").to_numpy(), studied.map.recovered, atol=1e-6)
    assert (studied.folder / "patching.png").stat().st_size > 5_000


def test_prompts_that_cannot_be_compared_by_position_are_refused(tmp_path: Path) -> None:
    def rows(corrupted: list[int], wrong: list[int]) -> dict[str, dict[str, object]]:
        ids = {
            "clean": CLEAN,
            "clean-right": [*CLEAN, 5],
            "clean-wrong": [*CLEAN, *wrong],
            "corrupted-right": [*corrupted, 5],
            "corrupted-wrong": [*corrupted, *wrong],
        }
        return {
            name: {"prompt": words(sent), "prompt_token_ids": sent} for name, sent in ids.items()
        }

    with pytest.raises(UnequalPromptsError, match=r"8 tokens and 'w17 .* has 8 instead"):
        read_places(rows(CORRUPTED[:-1], [6]), tmp_path)
    with pytest.raises(UnequalPromptsError, match="has 10 instead"):
        read_places(rows(CORRUPTED, [6, 7]), tmp_path)
    with pytest.raises(UnequalPromptsError, match="same token"):
        read_places(rows(CORRUPTED, [5]), tmp_path)
