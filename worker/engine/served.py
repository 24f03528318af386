"""An engine core in its own process, behind vLLM's AsyncLLM: what a worker serves from."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from worker.engine.protocol import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import RequestOutput

ABORT_SECONDS = 0.5  # a request that is not registered yet cannot be aborted by name


class ServedCore:
    """One AsyncLLM; its death becomes our EngineDeadError."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        """Spawn the engine process and wait (blocking) until its model is loaded."""
        try:
            self._llm: AsyncLLM | None = AsyncLLM.from_engine_args(args)
        except VllmEngineDeadError as error:
            raise EngineDeadError(str(error)) from error
        self.config = self.llm.vllm_config

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> RequestOutput:
        """Run one request to its end; a cancelled caller aborts it in the engine.

        `on_output` gets every output, before a cancelled caller goes on too. Returns the last.
        """
        if on_output is None:
            return await self._consume(prompt, params, request_id, lambda _output: None)
        consuming = asyncio.ensure_future(self._consume(prompt, params, request_id, on_output))
        try:
            return await asyncio.shield(consuming)
        except asyncio.CancelledError:
            # Aborted by its name, it still gives out what was made, and then ends.
            with contextlib.suppress(VllmEngineDeadError, EngineDeadError):
                await self.llm.abort(request_id)
                await asyncio.wait({consuming}, timeout=ABORT_SECONDS)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
            raise

    async def _consume(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        on_output: Callable[[RequestOutput], None],
    ) -> RequestOutput:
        final: RequestOutput | None = None
        try:
            async for output in self.llm.generate(prompt, params, request_id):
                final = output
                on_output(output)
        except VllmEngineDeadError as error:
            raise EngineDeadError(str(error)) from error
        if final is None:
            msg = f"the engine gave no output for {request_id}"
            raise EngineDeadError(msg)
        return final

    async def give_up(self, note: str) -> None:
        """Relay a note about a seat that stays empty (see `groups`)."""
        if self._llm is not None:
            with contextlib.suppress(VllmEngineDeadError):
                await self._llm.engine_core.abort_requests_async([note])

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine process is gone."""
        try:
            await self.llm.check_health()
        except VllmEngineDeadError as error:
            raise EngineDeadError(str(error)) from error

    def shutdown(self) -> None:
        """Stop the engine process; idempotent.

        vLLM's object is dropped here and now: at interpreter exit its finaliser would fail.
        """
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
            del llm
            gc.collect()

    @property
    def llm(self) -> AsyncLLM:
        """The engine; raises EngineDeadError after shutdown."""
        if self._llm is None:
            raise EngineDeadError("the engine was shut down")
        return self._llm
