"""Celery around a WorkerService: one task, the solo pool, nothing remote.

Solo because an engine must not be forked and because every other pool either duplicates it or
hides signals from it. SIGTERM makes Celery warm-shut-down after the task; the signal reaches us
first and ends the task early.
"""

import logging
import threading
from typing import Any

from celery import Celery
from celery import signals as celery_signals
from celery.worker import state as celery_state

from app.queue import WAKE_TASK, Waker, build_celery, queue_name
from worker.service import WorkerService

log = logging.getLogger(__name__)


def build_worker(service: WorkerService, redis_url: str) -> Any:
    """Build the Celery worker of `service`; its `start()` returns when it was told to stop."""
    celery = build_celery(redis_url)
    _register(celery, service)
    _follow_stop(service)
    waker = Waker(redis_url)

    def ready(**_: object) -> None:
        # Work that was submitted while the engine started is waiting: look once without being told.
        waker.wake(service.model.name)

    # Somebody listens here: Celery then leaves the process's logs as they are.
    celery_signals.setup_logging.connect(lambda **_: None, weak=False)
    celery_signals.worker_ready.connect(ready, weak=False)
    celery_signals.worker_shutting_down.connect(
        lambda **_: service.stopping.request("told to stop"), weak=False
    )
    return celery.Worker(
        hostname=f"{service.model.name}.{service.worker_id.hex[-12:]}@tiller",
        pool_cls="solo",
        concurrency=1,
        queues=[queue_name(service.model.name)],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        task_events=False,
        loglevel="WARNING",
        quiet=True,  # no banner among the log lines
        optimization="fair",
    )


def _register(celery: Celery, service: WorkerService) -> None:
    @celery.task(name=WAKE_TASK)  # type: ignore[untyped-decorator]
    def wake(model: str) -> None:
        """Look for work of this worker's model; messages for others cannot arrive here."""
        if model == service.model.name:
            service.drain()


def _follow_stop(service: WorkerService) -> None:
    """Pass every reason to stop (drain, memory, SIGTERM) on to Celery and to running shards."""

    def follow() -> None:
        service.stopping.wait()
        log.warning("stopping", extra={"reason": service.stopping.reason})
        service.poke()
        celery_state.should_stop = 0

    threading.Thread(target=follow, name="stop-follower", daemon=True).start()
