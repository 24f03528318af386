"""An engine core inside this very process, stepped by one thread: quick to start and to look into.

For tests and experiments; a served engine has its own process. vLLM keeps state per process, so
only one such engine may live at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.llm_engine import LLMEngine

from worker.engine.protocol import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import RequestOutput

ABORT_SECONDS = 10.0  # an engine that fails meanwhile never answers


class InProcessCore:
    """Runs vLLM's LLMEngine in a thread and answers on the caller's event loop."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model (blocking) and start the stepping thread."""
        self.llm = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self.config = self.llm.vllm_config
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._streamed: dict[str, Callable[[RequestOutput], None]] = {}
        self._held = False
        self._stop = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> RequestOutput:
        """Run one request to its end; `on_output` gets every output. Returns the last."""
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure
        loop = asyncio.get_running_loop()
        future: asyncio.Future[RequestOutput] = loop.create_future()
        self._waiting[request_id] = (loop, future)
        if on_output is not None:
            self._streamed[request_id] = on_output

        def add() -> None:
            try:
                self.llm.add_request(request_id, prompt, params)
            except Exception as error:  # noqa: BLE001 (handed to the caller)
                self._answer(request_id, error)

        self._command(add)
        try:
            return await future
        except asyncio.CancelledError:
            if on_output is None:
                self._waiting.pop(request_id, None)
                self._command(lambda: self.llm.abort_request([request_id]))
            else:
                await self._abort_streamed(request_id, loop)
            raise
        finally:
            self._streamed.pop(request_id, None)

    async def _abort_streamed(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        """Abort a request; what it made until then has been given out when this returns."""
        aborted = asyncio.Event()

        def abort() -> None:
            self.llm.abort_request([request_id])
            with contextlib.suppress(RuntimeError):  # its loop has ended, and nobody waits
                loop.call_soon_threadsafe(aborted.set)

        self._command(abort)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(aborted.wait(), ABORT_SECONDS)
        self._waiting.pop(request_id, None)

    async def give_up(self, note: str) -> None:
        """Relay a note about a seat that stays empty (see `groups`)."""
        self._command(lambda: self.llm.engine_core.abort_requests([note]))

    async def check_health(self) -> None:
        """Raise EngineDeadError after the stepping thread has failed."""
        if self._failure is not None:
            raise EngineDeadError(str(self._failure)) from self._failure

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take requests in without stepping, so that they start in one batch."""
        with self._wake:
            self._held = True
        try:
            yield
        finally:
            with self._wake:
                self._held = False
                self._wake.notify()

    def shutdown(self) -> None:
        """Stop the thread and drop the model; idempotent."""
        if self._stop:
            return
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()
        self.llm.engine_core.shutdown()
        del self.llm
        gc.collect()

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                for output in self.llm.step():
                    self._give_out(output)
                    if output.finished:
                        self._answer(output.request_id, output)
        except BaseException as error:  # noqa: BLE001 (the engine is dead; everybody hears of it)
            self._failure = error
            for request_id in list(self._waiting):
                self._answer(request_id, EngineDeadError(str(error)))

    def _wait(self) -> bool:
        """Do the commands; say whether to step on."""
        while True:
            with self._wake:
                commands, self._commands = self._commands, []
                idle = self._held or not self._has_work()
                if not commands:
                    if self._stop:
                        return False
                    if not idle:
                        return True
                    self._wake.wait()
            for command in commands:
                command()

    def _has_work(self) -> bool:
        """As in a served engine: a last step without tokens lets finished requests leave."""
        client: Any = self.llm.engine_core  # vLLM's in-process client, which holds the core itself
        scheduler = client.engine_core.scheduler
        return bool(self.llm.has_unfinished_requests() or scheduler.has_finished_requests())

    def _give_out(self, output: Any) -> None:
        on_output = self._streamed.get(output.request_id)
        waiting = self._waiting.get(output.request_id)
        if on_output is not None and waiting is not None:
            waiting[0].call_soon_threadsafe(on_output, output)

    def _answer(self, request_id: str, result: Any) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        loop, future = waiting

        def settle() -> None:
            if future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        loop.call_soon_threadsafe(settle)
