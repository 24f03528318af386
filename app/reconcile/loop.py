"""The reconciler: runs every step again and again, whatever one of them says.

Any number of these may run at once. It outlives Postgres, Redis and the object store: a step that
fails is logged and tried again in the next round.
"""

import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType

from app.kit.db import Database
from app.queue import Waker
from app.reconcile import steps
from app.reconcile.samples import take_sample
from app.results.finalize import finalize_job
from app.results.orphans import collect_orphan_parts
from app.settings import Settings
from app.storage import ObjectStore, open_store

log = logging.getLogger(__name__)

HOUR_SECONDS = 3600.0
JITTER = 0.2  # two reconcilers started together drift apart


@dataclass(slots=True)
class Step:
    """One duty: how often it is due, and when it is due next (monotonic seconds)."""

    name: str
    run: Callable[[], object]
    every_seconds: float = 0.0
    due_at: float = 0.0


def run_reconciler(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT: the body of the reconciler's process."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    database = Database(settings.database_url, size_max=4)
    waker = Waker(settings.redis_url)
    try:
        reconcile_until(stop, settings, database, open_store(settings.object_store), waker)
    finally:
        waker.close()
        database.close()


def reconcile_until(
    stop: threading.Event,
    settings: Settings,
    database: Database,
    store: ObjectStore,
    waker: steps.SupportsWake,
) -> None:
    """Run rounds until `stop` is set, with a pause of about settings.reconcile_seconds."""
    duties = all_steps(database, store, waker)
    while not stop.is_set():
        run_round(duties, stop)
        pause = settings.reconcile_seconds
        stop.wait(pause * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 (no secret)


def all_steps(database: Database, store: ObjectStore, waker: steps.SupportsWake) -> list[Step]:
    """List the duties in the order of a round: what frees work comes before waking for it."""
    now = time.monotonic()
    hourly = {"every_seconds": HOUR_SECONDS, "due_at": now + HOUR_SECONDS * random.random()}  # noqa: S311
    return [
        Step("end_silent_sessions", partial(steps.end_silent_sessions, database)),
        Step("expire_leases", partial(steps.expire_leases, database)),
        Step("end_completions", partial(steps.end_completions, database)),
        Step("expire_jobs", partial(steps.expire_jobs, database)),
        Step(
            "finish_jobs",
            partial(steps.finish_jobs, database, partial(finalize_job, database, store)),
        ),
        Step("wake_models", partial(steps.wake_models, database, waker)),
        Step("mark_dead_workers", partial(steps.mark_dead_workers, database)),
        Step("take_sample", partial(take_sample, database)),
        Step(
            "forget_old_idempotency_keys",
            partial(steps.forget_old_idempotency_keys, database),
            every_seconds=60.0,
        ),
        Step("collect_orphan_parts", partial(collect_orphan_parts, database, store), **hourly),
        Step("audit", partial(steps.audit, database), **hourly),
    ]


def run_round(duties: list[Step], stop: threading.Event) -> None:
    """Run every step that is due, once."""
    for step in duties:
        now = time.monotonic()
        if stop.is_set():
            return
        if now < step.due_at:
            continue
        step.due_at = now + step.every_seconds
        try:
            done = step.run()
        except Exception as error:
            # Postgres, Redis or the store is away, or the step has a fault: the others go on.
            log.exception("reconciler step failed", extra={"step": step.name, "error": str(error)})
        else:
            if done:
                log.info("reconciler step", extra={"step": step.name, "done": _count(done)})


def _count(done: object) -> object:
    return len(done) if isinstance(done, list) else done
