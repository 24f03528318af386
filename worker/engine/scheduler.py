"""vLLM's scheduler with one thing forced: every newly allocated KV block is zeroed first.

vLLM zeroes only for models that need it. With steering, a request can leave NaN in its blocks,
and attention multiplies the masked tail of a reused block by zero: NaN times zero is NaN.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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


class ZeroingScheduler(Scheduler):
    """The scheduler for runners without asynchronous scheduling (CPU)."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Take vLLM's arguments, the KV cache configuration with zeroing forced."""
        super().__init__(vllm_config, zeroed(kv_cache_config), *args, **kwargs)


class ZeroingAsyncScheduler(AsyncScheduler):
    """The scheduler for runners with asynchronous scheduling (GPU)."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Take vLLM's arguments, the KV cache configuration with zeroing forced."""
        super().__init__(vllm_config, zeroed(kv_cache_config), *args, **kwargs)
