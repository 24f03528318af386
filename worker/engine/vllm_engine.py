"""The engine that serves: one vLLM, steered, behind the Engine protocol.

    RequestSpec -> ticket, region, carrier -> vLLM -> what the board and the region say -> Outcome

A request is judged after its last token: it succeeded only if the engine saw it, nothing was
flagged, and every row that it asked for is there and finite.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from app.steering.spec import Site, vector_names
from worker.engine.captured import (
    NON_FINITE,
    drop_regions,
    make_regions,
    needs_prompt,
    read_regions,
    reads_of,
)
from worker.engine.environment import (
    UnsupportedEngineError,
    check_compiling,
    check_device,
    prepare_environment,
    vllm_version,
)
from worker.engine.groups import SEAT_KEY, URGENT_KEY, Seat, note_of
from worker.engine.protocol import EngineDeadError, EngineFacts, Group, Piece
from worker.engine.settings import EngineSettings
from worker.engine.vectors import VectorCache
from worker.outcomes import CaptureRows, Errored, Outcome, Succeeded
from worker.steering.board import Flag, StatusBoard, Tickets
from worker.steering.carrier import Carrier, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from app.completions.spec import RequestSpec
    from app.steering.spec import Capture, Intervention
    from worker.engine.in_process import InProcessCore
    from worker.engine.pieces import Made
    from worker.engine.served import ServedCore
    from worker.steering.region import CaptureRegion

log = logging.getLogger(__name__)

_FLAG_ERRORS = {
    Flag.unknown_vector: ("unknown_vector", "A steering vector is not known to the engine."),
    Flag.plan_failed: ("steering_failed", "The interventions could not be applied."),
    Flag.non_finite: NON_FINITE,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to start an engine. `scratch_dir` belongs to this engine alone and is emptied.

    `kv_cache_bytes` is the size of the KV cache; `threads` the OpenMP threads of the model (None:
    as many as there are CPUs). `mode` is "eager" or "compiled"; compiled code is kept in
    `compile_cache` (None: where torch keeps it). Beside `max_num_seqs` requests,
    `urgent_seats` urgent ones run, so that they need not wait until one ends. With `in_process`
    the model runs in this process, for tests.
    """

    model_name: str
    model_path: Path
    revision: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    scratch_dir: Path
    mode: str = "eager"
    compile_cache: Path | None = None
    urgent_seats: int = 8
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    in_process: bool = False
    threads: int | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    max_logprobs: int = 100
    log_level: str = "ERROR"

    @property
    def ranks(self) -> int:
        """How many processes run the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(slots=True)
class _Stay:
    """One engine request's stay in the engine: its ticket and regions, to be cleaned up.

    `seat` is its place in a group; an `urgent` one goes before those that wait. Pieces go to
    `on_piece` as they are made.
    """

    ticket: int | None = None
    regions: list[tuple[Capture, CaptureRegion]] = field(default_factory=list)
    ops: tuple[Intervention, ...] = ()
    seat: Seat | None = None
    urgent: bool = False
    on_piece: Callable[[Piece], None] | None = None


class VllmEngine:
    """Implements the Engine protocol; make one with `start`."""

    def __init__(
        self, config: EngineConfig, core: ServedCore | InProcessCore, board: StatusBoard
    ) -> None:
        """Take over a started core; use `start` instead."""
        # After the core: vLLM must not be imported before its environment stands.
        from worker.engine.architectures import head_count, site_widths

        model = core.config.model_config
        self.vectors = VectorCache(config.scratch_dir / "vectors")
        self.core = core
        self._config = config
        self._tickets = Tickets(board)
        self._numbers = itertools.count()
        self._dead: EngineDeadError | None = None
        self._facts = EngineFacts(
            model=config.model_name,
            revision=config.revision,
            engine=f"vllm {vllm_version()}",
            mode=config.mode,
            dtype=str(model.dtype).removeprefix("torch."),
            hidden_size=model.get_hidden_size(),
            n_layers=model.get_total_num_hidden_layers(),
            max_num_seqs=config.max_num_seqs,
            site_widths=site_widths(core.config),
            n_heads=head_count(model),
            urgent_seats=config.urgent_seats,
        )

    @classmethod
    async def start(cls, config: EngineConfig) -> VllmEngine:
        """Load the model and return the running engine.

        Blocks the event loop while it loads: the engine process dies with the thread that
        spawned it, so that thread must be the loop's own. Raises UnsupportedEngineError for a
        vLLM, model or setting that cannot be steered.
        """
        prepare_environment(log_level=config.log_level, compile_cache=config.compile_cache)
        vllm_version()
        check_device()
        if config.mode == "compiled":
            check_compiling(config.compile_cache)
        settings = EngineSettings(
            scratch=str(config.scratch_dir),
            parent_pid=os.getpid(),
            in_process=config.in_process,
            mode=config.mode,
        )
        shutil.rmtree(settings.captures_path, ignore_errors=True)
        settings.captures_path.mkdir(parents=True)
        settings.vectors_path.mkdir(exist_ok=True)
        board = StatusBoard(settings.board_path, ranks=config.ranks, create=True)
        core = _start_core(config, settings)
        return cls(config, core, board)

    @property
    def facts(self) -> EngineFacts:
        """Facts about model and engine, fixed at start."""
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
        """Run one request to its end; see the Engine protocol.

        Choice i of n is an engine request of its own, with seed + i. Captures need n = 1.
        """
        if self._dead is not None:
            raise self._dead
        started_at = time.time()
        choices = range(spec.sampling.n)
        tasks = [
            asyncio.ensure_future(self._run_seated(key, spec, index, salt, group))
            if group is not None
            else asyncio.ensure_future(
                self._run_choice(key, spec, index, salt, urgent=urgent, on_piece=on_piece)
            )
            for index in choices
        ]
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for result in results:
            if isinstance(result, Errored):
                return result
        done = [result for result in results if isinstance(result, Succeeded)]
        return replace(
            done[0],
            choices=tuple(choice for result in done for choice in result.choices),
            started_at=started_at,
            finished_at=time.time(),
        )

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine cannot run requests any more."""
        if self._dead is not None:
            raise self._dead
        await self.core.check_health()

    async def shutdown(self) -> None:
        """Stop the engine and its processes and delete its regions."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        self.core.shutdown()
        shutil.rmtree(self._config.scratch_dir / "captures", ignore_errors=True)

    async def _run_seated(
        self, key: str, spec: RequestSpec, index: int, salt: str, group: Group
    ) -> Succeeded | Errored:
        """Run one choice; whatever becomes of it, its group does not wait for it in vain."""
        seat, result = group.seat(index), None
        try:
            result = await self._run_choice(key, spec, index, salt, seat=seat)
            return result
        finally:
            if not isinstance(result, Succeeded):
                await self.core.give_up(note_of(seat))

    async def _run_choice(
        self,
        key: str,
        spec: RequestSpec,
        index: int,
        salt: str,
        *,
        seat: Seat | None = None,
        urgent: bool = False,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Succeeded | Errored:
        refused = self._refuse(spec)
        if refused is not None:
            return refused
        with self._stay(spec, key) as stay:
            if isinstance(stay, Errored):
                return stay
            stay.seat, stay.urgent, stay.on_piece = seat, urgent, on_piece
            made = await self._generate(key, spec, index, salt, stay)
            if isinstance(made, Errored):
                return made
            return self._judge(spec, made, stay)

    def _refuse(self, spec: RequestSpec) -> Errored | None:
        """Check what only the engine knows for sure: layers, sites, heads and vectors."""
        facts = self._facts
        touched = [(item.site, item.layer) for item in spec.interventions]
        touched += [(read.site, layer) for read in spec.captures for layer in read.layers]
        for site, layer in touched:
            if not 0 <= layer < facts.n_layers:
                return _no_layer(layer, facts.n_layers)
            if site not in facts.site_widths:
                return Errored(
                    "invalid_request",
                    f"{facts.model} has no site {site.value} here; it has "
                    f"{', '.join(facts.site_widths)}.",
                )
        if not all(map(self.vectors.has, vector_names(spec.interventions, spec.captures))):
            return Errored(*_FLAG_ERRORS[Flag.unknown_vector])
        return None

    @contextlib.contextmanager
    def _stay(self, spec: RequestSpec, key: str) -> Iterator[_Stay | Errored]:
        """Give a request its ticket and regions, and clean up unless the regions are handed on."""
        stay = _Stay()
        stay.ops = tuple(item for item in spec.interventions if not item.changes_nothing)
        try:
            if spec.captures or stay.ops:
                stay.ticket = self._tickets.take()
            if spec.captures:
                name = "".join(char if char.isalnum() else "-" for char in key)[:64]
                prefix = self._config.scratch_dir / "captures" / f"{name}.{next(self._numbers)}"
                widths, dtype = self._facts.site_widths, self._facts.dtype
                stay.regions = make_regions(spec, prefix, widths, dtype)
        except (OSError, RuntimeError) as error:
            self._leave(stay)
            yield Errored("steering_failed", str(error))
            return
        try:
            yield stay
        finally:
            self._leave(stay)

    def _leave(self, stay: _Stay) -> None:
        if stay.ticket is not None:
            self._tickets.give_back(stay.ticket)
        drop_regions(stay.regions)

    async def _generate(
        self, key: str, spec: RequestSpec, index: int, salt: str, stay: _Stay
    ) -> Made | Errored:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineGenerateError

        from worker.engine.pieces import Pieces, made_of
        from worker.engine.sampling import to_params

        carried = {} if stay.ticket is None else pack(self._carrier(stay))
        if stay.seat is not None:
            carried[SEAT_KEY] = list(stay.seat)
        if stay.urgent:
            carried[URGENT_KEY] = True
        skip_cache = needs_prompt(spec) or stay.seat is not None
        name, give = f"{key}.{index}.{next(self._numbers)}", stay.on_piece
        try:
            params = to_params(
                spec.sampling, index, carried, skip_cache=skip_cache, stream=give is not None
            )
            prompt = tokens_input(list(spec.prompt_token_ids), cache_salt=salt)
            if give is None:
                return made_of(spec, index, await self.core.generate(prompt, params, name))
            pieces = Pieces(spec, index, give, lambda: self._failed(stay) is not None)
            last = await self.core.generate(prompt, params, name, on_output=pieces.take)
            return pieces.whole(last)
        except EngineDeadError as error:
            self._dead = error
            raise
        except VLLMClientError as error:
            return Errored("invalid_request", str(error))
        except (EngineGenerateError, ValueError, LookupError):
            log.exception("the engine failed on a request")  # no fault of who asked
            return Errored("engine_error", "The engine failed on this request.")

    def _carrier(self, stay: _Stay) -> Carrier:
        assert stay.ticket is not None
        return Carrier(ticket=stay.ticket, ops=stay.ops, reads=reads_of(stay.regions))

    def _failed(self, stay: _Stay) -> Errored | None:
        return None if stay.ticket is None else _flagged(self._tickets.flags(stay.ticket))

    def _judge(self, spec: RequestSpec, made: Made, stay: _Stay) -> Succeeded | Errored:
        rows = spec.prompt_tokens + len(made.choice.token_ids) - 1
        failed = self._failed(stay)
        if failed is not None:
            return failed
        captures: tuple[CaptureRows, ...] = ()
        if stay.regions:
            read = read_regions(stay.regions, rows, self._facts.dtype)
            if isinstance(read, Errored):
                return read
            captures, stay.regions = read, []  # the files now belong to the outcome
        return Succeeded(
            choices=(made.choice,),
            captures=captures,
            prompt_logprobs=made.prompt_logprobs,
            steered_rows=self._steered_rows(stay, rows),
        )

    def _steered_rows(self, stay: _Stay, rows: int) -> Mapping[tuple[Site, int], int]:
        """Count for each site and layer the rows that ran here and were steered."""
        if stay.ticket is None or not stay.ops:
            return {}
        first, done = self._tickets.span(stay.ticket)
        end = min(done, rows)
        covered: dict[tuple[Site, int], np.ndarray] = {}
        for item in stay.ops:
            mask = covered.setdefault((item.site, item.layer), np.zeros(rows, dtype=bool))
            if item.positions is not None:
                at = np.array(item.positions)
                mask[at[at < rows]] = True
            elif item.spans is not None:
                for begin, stop in item.spans:
                    mask[begin:stop] = True
            else:
                mask[:] = True
        return {point: int(mask[first:end].sum()) for point, mask in sorted(covered.items())}


def _start_core(config: EngineConfig, settings: EngineSettings) -> ServedCore | InProcessCore:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    arguments = _arguments(config, settings)
    if config.in_process:
        from worker.engine.in_process import InProcessCore

        with _environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
            return InProcessCore(EngineArgs(**arguments))
    from worker.engine.served import ServedCore

    threads = config.threads or len(os.sched_getaffinity(0))
    variables = {"OMP_NUM_THREADS": str(threads)}
    if config.ranks > 1:
        # vLLM would give each rank a memory node of its own, of which most machines have one.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with _environment(variables):
        return ServedCore(AsyncEngineArgs(enable_log_requests=False, **arguments))


def _arguments(config: EngineConfig, settings: EngineSettings) -> dict[str, Any]:
    """Write a configuration as vLLM's arguments."""
    from vllm.platforms import current_platform

    from worker.engine.executor import ManyProcessExecutor, OneProcessExecutor
    from worker.engine.layer_op import compilation_with_graphs
    from worker.engine.scheduler import ZeroingAsyncScheduler, ZeroingScheduler

    if config.mode not in ("eager", "compiled"):
        msg = f"mode is {config.mode!r}; it can be 'eager' or 'compiled'"
        raise UnsupportedEngineError(msg)
    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(config.model_path),
        "served_model_name": config.model_name,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs + config.urgent_seats,
        "max_num_active_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(
            config.max_num_batched_tokens, config.max_num_seqs + config.urgent_seats
        ),
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "block_size": config.block_size,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.mode == "eager",
        "max_logprobs": config.max_logprobs,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
        "worker_cls": (
            "worker.engine.cpu_worker.SteeredCPUWorker"
            if on_cpu
            else "worker.engine.gpu_worker.SteeredGPUWorker"
        ),
        "scheduler_cls": ZeroingScheduler if on_cpu else ZeroingAsyncScheduler,
        "distributed_executor_backend": (
            ManyProcessExecutor if config.ranks > 1 else OneProcessExecutor
        ),
        "additional_config": settings,
    }
    if config.mode == "compiled" and not on_cpu:
        arguments["compilation_config"] = compilation_with_graphs()
    return arguments


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes spawned inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _no_layer(layer: int, n_layers: int) -> Errored:
    return Errored(
        "invalid_request",
        f"There is no Layer {layer}: the model has {n_layers} layers, 0 to {n_layers - 1}.",
    )


def _flagged(flags: Flag) -> Errored | None:
    for flag, (code, message) in _FLAG_ERRORS.items():
        if flag in flags:
            return Errored(code, message)
    if Flag.seen not in flags:
        return Errored("steering_failed", "The engine did not register the request.")
    return None
