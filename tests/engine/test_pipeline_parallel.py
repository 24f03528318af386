"""Two stages of a pipeline give the rows and tokens of one process, every site included."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from app.completions.salt import salt_for
from app.completions.spec import RequestSpec, Sampling
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import ACCOUNT, config_for, run_together
from tests.engine.mixes import mixed_cases, worst_error
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Outcome, Succeeded

LAYERS, WIDTH, Z_WIDTH = 4, 64, 128


def specs_of_every_site(engine: VllmEngine) -> list[RequestSpec]:
    """Ask for each op at each site on both sides of the cut, and read all layers."""
    numbers = np.random.default_rng(3)
    for width in (WIDTH, Z_WIDTH):
        rows = numbers.normal(size=(LAYERS, width)).astype(np.float32)
        engine.vectors.put(f"sv_pipeline_{width}", rows)
    asked = []
    for index, site in enumerate(Site):
        name = f"sv_pipeline_{engine.facts.site_widths[site]}"
        ops = tuple(
            op
            for layer in range(LAYERS)
            for op in (
                Intervention(Op.add, site, layer, name, layer, scale=0.5, summed=True),
                Intervention(Op.add, site, layer, name, 0, scale=0.2, norm_match=True),
                Intervention(Op.orthogonal, site, layer, name, 1, coeff=0.0, spans=((1, 6),)),
                Intervention(Op.cap, site, layer, name, 2, low=-0.5, high=0.5),
                Intervention(Op.replace, site, layer, name, 2, positions=(2, 9)),
            )
        )
        reads = tuple(
            Capture(f"{read.value}.{before}", read, (0, 1, 2, 3), before=before)
            for read in (site, Site.resid_post)
            for before in (True, False)
        )
        prompt = tuple(int(token) for token in numbers.integers(3, 256, 7 + index))
        sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
        asked.append(RequestSpec(prompt, None, sampling, ops, reads))
    return asked


def assert_equal(one: Outcome, other: Outcome) -> None:
    """Compare tokens, rows and the count of steered rows."""
    assert isinstance(one, Succeeded), one
    assert isinstance(other, Succeeded), other
    assert one.choices[0].token_ids == other.choices[0].token_ids
    assert one.steered_rows == other.steered_rows
    for left, right in zip(one.captures, other.captures, strict=True):
        assert [*left.layers] == [*right.layers]
        for layer, rows in left.layers.items():
            np.testing.assert_allclose(right.layers[layer], rows, rtol=1e-5, atol=1e-5)


# vLLM's front of a served engine leaves its sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_stages_equal_the_reference_and_one_process(
    engine: VllmEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    asked = specs_of_every_site(engine)
    alone = run_together(engine, asked)
    model = plain_forward.load(tiny_llama)
    config = config_for(tiny_llama, tmp_path, in_process=False, pipeline_parallel_size=2, threads=1)

    async def everything() -> None:
        staged = await VllmEngine.start(config)
        try:
            assert staged.facts.site_widths == engine.facts.site_widths
            cases = mixed_cases(staged.vectors, count=12, n_layers=4, width=64, vocab=256, seed=5)
            specs_of_every_site(staged)
            specs = [case.spec for case in cases] + asked
            runs = (staged.run(f"{n}", s, salt=salt_for(ACCOUNT, s)) for n, s in enumerate(specs))
            outcomes: list[Outcome] = list(await asyncio.gather(*runs))
        finally:
            await staged.shutdown()
        errors = [worst_error(model, *pair) for pair in zip(cases, outcomes, strict=False)]
        assert max(errors) <= 1e-5
        for one, other in zip(alone, outcomes[len(cases) :], strict=True):
            assert_equal(one, other)

    asyncio.run(everything())
