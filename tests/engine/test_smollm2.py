"""SmolLM2-135M in float32 with real prompts, against the plain reference."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tests.engine.engines import engine_for
from tests.models.families import Family
from tests.parity.comparing import Reference, assert_equal
from tests.parity.draws import Dice, at_random
from tests.parity.running import run
from tests.reference import process
from worker.models import add
from worker.models.settings import load_fetch_settings

OPENINGS = (
    "The weather in the mountains was",
    "My favourite recipe begins with",
    "She opened the letter and",
    "A prime number is a number that",
    "In the year 1804 the city of",
    "The film that we saw last night was a great example of",
    "Water boils at a lower temperature when",
    "def add(first, second):\n    return",
)
SUBJECTS = (
    "Dear friend,",
    "A short note.",
    "Chapter one.",
    "Question:",
    "It is said that",
    "News of the day:",
    "Once upon a time,",
    "1.",
)


# The largest of its activations are thousands of times the usual ones.
TOLERANCE = 1e-4

SMOLLM2 = Family(
    "smollm2-135m",
    "LlamaForCausalLM",
    "LlamaConfig",
    width=576,
    layers=30,
    heads=9,
    head_dim=64,
    kv_heads=3,
)


def test_64_random_requests_equal_the_reference(tmp_path: Path) -> None:
    cache = load_fetch_settings().cache_dir
    folder = add.add_wheel_model("smollm2-135m", tmp_path, cache=cache)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    dice = Dice("smollm2")
    asked = [
        at_random(
            dice,
            SMOLLM2,
            ids=tuple(tokenizer.encode(f"{subject} {opening}").ids),
            tokens=(1, 6),
        )
        for subject in SUBJECTS
        for opening in OPENINGS
    ]
    with (
        process.start() as pool,
        engine_for(folder, tmp_path / "scratch", kv_cache_bytes=512 << 20) as engine,
    ):
        ran = run(engine, asked)
        compared = Reference(pool, folder).compare(asked, ran.outcomes)
    assert ran.seen.together == len(asked)
    assert_equal(range(len(asked)), asked, compared, tolerance=TOLERANCE)
