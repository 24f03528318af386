"""vLLM's scheduler with three things added: zeroed KV blocks, groups that run by themselves, and
urgent requests, which stand in front of all others and have some seats of their own.

vLLM zeroes new KV blocks only for models that need it. With steering, a request can leave NaN in
its blocks, and attention multiplies the masked tail of a reused block by zero: NaN times zero is
NaN. What a group is and why it runs with nothing beside it: see `groups`.
"""

from __future__ import annotations

import copy
import time
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from worker.engine.environment import check_signature
from worker.engine.groups import URGENT_KEY, Turnstile, read_note, seat_of
from worker.steering.carrier import CARRIER_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

_SIGNATURES = {
    "add_request": ("self", "request"),
    "schedule": ("self", "throttle_prefills"),
    "finish_requests": ("self", "request_ids", "finished_status"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "_preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
}


class ZeroedKVCacheConfig(KVCacheConfig):
    """A KV cache whose new blocks are zeroed before use."""

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Always: see the module."""
        return True


def zeroed(config: KVCacheConfig) -> KVCacheConfig:
    """Return the same configuration with zeroing forced."""
    forced = copy.copy(config)
    forced.__class__ = ZeroedKVCacheConfig
    return forced


class GroupingScheduler(Scheduler):
    """Lets a group in when all of it is there and the engine is empty, and then nobody else.

    A request that waits at the turnstile is known to vLLM but in none of its queues, so it can be
    aborted and costs no step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments; raise UnsupportedEngineError for another vLLM's methods."""
        for name, expected in _SIGNATURES.items():
            check_signature(getattr(Scheduler, name), expected)
        super().__init__(*args, **kwargs)
        self._turnstile: Turnstile[Request] = Turnstile()
        self._seats = self.max_num_active_reqs  # of requests that are not urgent
        self._urgent: set[str] = set()  # ids of urgent requests, some of which may be over

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step; urgent requests find seats, and keep their blocks before all others."""
        self._urgent &= self.requests.keys()
        if self._urgent:
            self._put_urgent_first()
        self._make_room()
        if self._urgent:
            self._preempt_for_urgent()
        return super().schedule(*args, **kwargs)

    def add_request(self, request: Request) -> None:
        """Take a request in; it may have to wait for its group, or for another one."""
        super().add_request(request)
        carried = _carried(request)
        if self._turnstile.hold(request, seat_of(carried)):
            self.waiting.remove_requests([request])
            self._turn()
        elif _is_urgent(request):
            self.waiting.remove_requests([request])
            self._queue(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside; an aborted member of a running group goes on unseen."""
        if request_ids is not None and finished_status is RequestStatus.FINISHED_ABORTED:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            request_ids = [name for name in ids if not self._is_for_turnstile(name)]
        ended = super().finish_requests(request_ids, finished_status)
        if self._turnstile.in_use:
            for request in ended:
                self._turnstile.forget(request)
            self._turn()
        return ended

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take a step's tokens; requests that ended may make room for a group."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._turnstile.in_use:
            self._turn()
        return outputs

    def _put_urgent_first(self) -> None:
        """Move urgent requests to the front of those that run and of those that wait.

        When the KV cache is full, vLLM preempts from the back of those that run, and puts what it
        preempted in front of those that wait. Where a request stands there does not matter to the
        batch: the runner keeps rows in an order of its own.
        """
        self.running.sort(key=lambda request: request.request_id not in self._urgent)
        queue: Any = self.waiting
        urgent = [request for request in queue if request.request_id in self._urgent]
        if urgent != list(islice(queue, len(urgent))):
            queue.remove_requests(urgent)
            queue.extendleft(reversed(urgent))

    def _preempt_for_urgent(self) -> None:
        """Preempt requests that are not urgent until the first urgent one that waits can start.

        By itself vLLM preempts only for those that run, and these take what becomes free.
        """
        queue: Any = self.waiting
        has_seat = len(self.running) < self.max_num_active_reqs
        if not has_seat or not queue or queue[0].request_id not in self._urgent:
            return
        first, pool = queue[0], self.kv_cache_manager.block_pool
        others = [each for each in self.running if each.request_id not in self._urgent]
        kept = [each for each in self.running if each.request_id in self._urgent]
        needed, shared = self._blocks_needed(first)
        if pool.get_num_free_blocks() >= needed:
            return
        # What urgent requests share with others does not become free, nor does what is shared with
        # the one that waits.
        freed = self._blocks_held(others) - self._blocks_held(kept) - shared
        if pool.get_num_free_blocks() + len(freed) < needed:
            return
        while others and pool.get_num_free_blocks() < self._blocks_needed(first)[0]:
            victim = others.pop()
            if not self._request_blocks_can_be_freed(victim):
                return
            self.running.remove(victim)
            self._preempt_request(victim, time.monotonic())
        self._put_urgent_first()

    def _blocks_needed(self, request: Request) -> tuple[int, set[int]]:
        """Count the blocks that vLLM must find free before a request starts; name cached ones.

        Those that it finds in the prefix cache are counted when nobody holds them.
        """
        manager = self.kv_cache_manager
        cached, computed, _ = manager.get_computed_blocks(request)
        tokens = min(request.num_tokens, self.max_model_len)
        needed = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=cached.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
        )
        return needed, {block.block_id for group in cached.blocks for block in group}

    def _blocks_held(self, requests: list[Request]) -> set[int]:
        """Name the blocks of some requests, each once however many share it."""
        manager = self.kv_cache_manager
        groups = [group for each in requests for group in manager.get_block_ids(each.request_id)]
        return set().union(*groups) - {manager.block_pool.null_block.block_id}

    def _make_room(self) -> None:
        """Let as many more run as urgent ones run, or wait in front: they alone can take it."""
        self.max_num_active_reqs = self._seats
        if not self._urgent:
            return
        queue: Any = self.waiting
        present = sum(map(_is_urgent, self.running)) + sum(1 for _ in takewhile(_is_urgent, queue))
        self.max_num_active_reqs = min(self._seats + present, self.max_num_running_reqs)

    def _is_for_turnstile(self, request_id: str) -> bool:
        """Tell whether an abort ends here: it is a note, or about a request that must go on."""
        seat = read_note(request_id)
        if seat is not None:
            self._turnstile.give_up(seat)
            return True
        request = self.requests.get(request_id)
        return request is not None and self._turnstile.keep_inside(request)

    def _turn(self) -> None:
        """Queue what the turnstile lets through now."""
        self._turnstile.settle(Request.is_finished)
        unseen = self._turnstile.abandoned()
        if unseen:
            ids = [request.request_id for request in unseen]
            super().finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            self._turnstile.settle(Request.is_finished)
        busy = bool(self.running or self.waiting or self.kv_holding_waiting)
        for request in self._turnstile.admit(busy=busy):
            self._queue(request)

    def _queue(self, request: Request) -> None:
        """Let a request wait for its seat: an urgent one in front, behind those before it."""
        queue: Any = self.waiting  # a deque: first come, first served
        if not _is_urgent(request):
            queue.add_request(request)
            return
        queue.insert(sum(1 for _ in takewhile(_is_urgent, queue)), request)
        self._urgent.add(request.request_id)


def _carried(request: Request) -> dict[str, Any] | None:
    params = request.sampling_params
    return params.extra_args.get(CARRIER_KEY) if params and params.extra_args else None


def _is_urgent(request: Request) -> bool:
    carried = _carried(request)
    return bool(carried and carried.get(URGENT_KEY))


class ZeroingScheduler(GroupingScheduler):
    """The scheduler for runners without asynchronous scheduling (CPU)."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Take vLLM's arguments, the KV cache configuration with zeroing forced."""
        super().__init__(vllm_config, zeroed(kv_cache_config), *args, **kwargs)


class ZeroingAsyncScheduler(GroupingScheduler, AsyncScheduler):
    """The scheduler for runners with asynchronous scheduling (GPU)."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Take vLLM's arguments, the KV cache configuration with zeroing forced."""
        super().__init__(vllm_config, zeroed(kv_cache_config), *args, **kwargs)
