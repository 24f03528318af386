"""An engine for fault runs: deterministic by request, a few milliseconds each, no model.

It exists because a fault run needs hundreds of worker starts. Nothing outside tests/ can select
it. Prompts choose misbehaviour: a request whose first token id is DIES ends the process's engine,
HANGS never answers, FAILS errs alone, STALLS hangs after some tokens and BREAKS fails after some
where they are streamed; DRIPS takes a moment for each token.
"""

import asyncio
import hashlib
from collections.abc import Callable

import numpy as np

from app.completions.spec import RequestSpec
from app.steering.spec import Capture, Reduce
from worker.engine.protocol import EngineDeadError, EngineFacts, Group, Piece
from worker.outcomes import CaptureRows, Choice, Errored, Outcome, Succeeded

DIES, HANGS, FAILS = 3, 4, 5
STALLS, BREAKS, DRIPS = 60, 61, 62
TOKENS_BEFORE = 3  # of a stream that stalls or breaks
DRIP_SECONDS = 0.1
HIDDEN, LAYERS = 16, 2


class StubEngine:
    """Answers every request with tokens and rows that depend on its spec alone."""

    def __init__(self, *, seconds_per_request: float = 0.003, model: str = "tiny") -> None:
        """Take `seconds_per_request` for each answer."""
        self._seconds = seconds_per_request
        self._dead = False
        self._facts = EngineFacts(
            model=model,
            revision="stub",
            engine="stub 1",
            mode="eager",
            dtype="float32",
            hidden_size=HIDDEN,
            n_layers=LAYERS,
            max_num_seqs=32,
        )
        self.requests_run = 0

    @property
    def facts(self) -> EngineFacts:
        """Give the same facts for ever."""
        return self._facts

    async def run(
        self,
        key: str,
        spec: RequestSpec,
        *,
        salt: str,
        group: Group | None = None,
        urgent: bool = False,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Outcome:
        """Answer after a moment; misbehave if the prompt says so."""
        del key, salt, group, urgent
        self._check()
        await asyncio.sleep(self._seconds)
        first = spec.prompt_token_ids[0]
        if first == DIES:
            self._dead = True
        self._check()
        if first == HANGS:
            await asyncio.Event().wait()
        if first == FAILS:
            return Errored("steering_failed", "The stub was told to fail this request.")
        self.requests_run += 1
        outcome = answer(spec)
        if on_piece is not None:
            await self._stream(first, outcome.choices[0], on_piece)
            if first == BREAKS:
                return Errored("steering_failed", "The stub was told to break this stream.")
        return outcome

    async def _stream(self, first: int, choice: Choice, give: Callable[[Piece], None]) -> None:
        tokens = choice.token_ids
        for number, token in enumerate(tokens):
            if number == TOKENS_BEFORE and first == STALLS:
                await asyncio.Event().wait()
            if number == TOKENS_BEFORE and first == BREAKS:
                return
            if first == DRIPS:
                await asyncio.sleep(DRIP_SECONDS)
            is_last = number == len(tokens) - 1
            text = f"{token}" if number == 0 else f" {token}"
            give(Piece(0, text, (token,), choice.finish_reason if is_last else None))
            await asyncio.sleep(0)

    async def check_health(self) -> None:
        """Say whether the engine died."""
        self._check()

    async def shutdown(self) -> None:
        """Nothing to stop."""

    def _check(self) -> None:
        if self._dead:
            msg = "the stub engine died"
            raise EngineDeadError(msg)


def answer(spec: RequestSpec) -> Succeeded:
    """Compute what the stub answers: M tokens, and rows where captures ask for them."""
    seed = hashlib.sha256(repr(spec).encode()).digest()
    tokens = tuple(7 + seed[i % 32] % 50 for i in range(spec.sampling.max_tokens))
    ran = spec.prompt_tokens + len(tokens) - 1
    rng = np.random.default_rng(int.from_bytes(seed[:8], "big"))
    captures = tuple(_captured(capture, ran, rng) for capture in spec.captures)
    text = " ".join(map(str, tokens))
    return Succeeded((Choice(0, text, tokens, "length"),), captures)


def _captured(capture: Capture, ran: int, rng: np.random.Generator) -> CaptureRows:
    positions = np.array([p for p in range(ran) if capture.reads(p)], dtype=np.int32)
    rows = min(len(positions), 1) if capture.reduce is Reduce.mean else len(positions)
    shape = (rows, capture.width(HIDDEN))
    return CaptureRows(
        capture.name,
        "float32",
        {layer: rng.standard_normal(shape, dtype=np.float32) for layer in capture.layers},
        positions,
        capture.reduce,
    )
