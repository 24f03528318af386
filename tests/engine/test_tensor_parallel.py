"""Two ranks give the rows and tokens of one: each steers, one captures, heads are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from app.completions.salt import salt_for
from app.steering.spec import Capture, Intervention, Op, Site
from tests.engine.engines import ACCOUNT, config_for
from tests.engine.mixes import mixed_cases, worst_error
from tests.reference import plain_forward
from worker.engine.vllm_engine import VllmEngine
from worker.outcomes import Errored, Outcome


# vLLM's front of a served engine leaves its sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_ranks_equal_the_reference(tiny_llama: Path, tmp_path: Path) -> None:
    config = config_for(tiny_llama, tmp_path, in_process=False, tensor_parallel_size=2, threads=1)
    model = plain_forward.load(tiny_llama)

    async def everything() -> None:
        engine = await VllmEngine.start(config)
        try:
            assert Site.z not in engine.facts.site_widths
            cases = mixed_cases(engine.vectors, count=12, n_layers=4, width=64, vocab=256, seed=5)
            specs = [case.spec for case in cases]
            engine.vectors.put("sv_heads", [0.5] * 128)
            on_heads = Intervention(Op.add, Site.z, 1, "sv_heads", 0)
            of_heads = Capture("heads", Site.z, (1,))
            specs += [
                replace(specs[0], interventions=(on_heads,)),
                replace(specs[0], captures=(of_heads,)),
            ]
            runs = (engine.run(f"{n}", s, salt=salt_for(ACCOUNT, s)) for n, s in enumerate(specs))
            outcomes: list[Outcome] = list(await asyncio.gather(*runs))
        finally:
            await engine.shutdown()
        errors = [worst_error(model, *pair) for pair in zip(cases, outcomes, strict=False)]
        assert max(errors) <= 1e-5
        for refused in outcomes[len(cases) :]:
            assert isinstance(refused, Errored)
            assert (refused.code, "z" in refused.message) == ("invalid_request", True)

    asyncio.run(everything())
