"""The Celery app and the only message there is: "there may be work for model M".

A wake-up may be lost, doubled or reordered: workers lease from Postgres, and the reconciler wakes
every model with claimable work once a period. So sending is bounded in time and allowed to fail.
"""

import logging

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

WAKE_TASK = "tiller.wake"
WAKE_EXPIRES_SECONDS = 60


def queue_name(model: str) -> str:
    """Name the Celery queue of a model's workers."""
    return f"model.{model}"


def build_celery(redis_url: str) -> Celery:
    """Build the Celery app that API, reconciler and workers share.

    Every option answers a known failure of Celery on Redis: no result backend (it grows), no
    remote control and no events (keys without a time to live), short socket timeouts (publishing
    to a frozen Redis blocks for ever by default), prefetch off (a long task starves idle
    workers), no acks_late (attempts are counted in Postgres).
    """
    app = Celery("tiller", broker=_broker_url(redis_url))
    app.conf.update(
        task_ignore_result=True,
        result_backend=None,
        task_serializer="json",
        accept_content=["json"],
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        task_publish_retry=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        task_send_sent_event=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "socket_connect_timeout": 1,
            "socket_timeout": 5,
            "max_retries": 1,
            "interval_start": 0,  # 2 s by default, which every POST would wait without Redis
            "interval_max": 0.2,
            "health_check_interval": 10,
            "visibility_timeout": 120,
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
        },
    )
    return app


class Waker:
    """Sends wake-ups; never raises, because losing one only costs a reconciler period."""

    def __init__(self, redis_url: str) -> None:
        """Prepare the Celery app; connects on first use."""
        self._celery = build_celery(redis_url)

    def wake(self, model: str) -> bool:
        """Tell workers of `model` that there may be work; False when the broker did not take it."""
        try:
            self._celery.send_task(
                WAKE_TASK, args=[model], queue=queue_name(model), expires=WAKE_EXPIRES_SECONDS
            )
        except (OperationalError, RedisError, OSError) as error:
            log.warning("wake-up not sent", extra={"model": model, "error": str(error)})
            return False
        return True

    def reachable(self) -> bool:
        """Tell whether the broker answers within its short timeouts."""
        try:
            with self._celery.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, timeout=2, interval_start=0)
        except (OperationalError, RedisError, OSError):
            return False
        return True

    def close(self) -> None:
        """Close the connections to the broker."""
        self._celery.close()


def _broker_url(redis_url: str) -> str:
    """Turn unix:///path into the form that Celery knows (redis+socket://)."""
    scheme, separator, rest = redis_url.partition("://")
    if not separator or scheme not in ("redis", "rediss", "unix"):
        msg = f"TILLER_REDIS_URL must begin with redis://, rediss:// or unix://: {scheme!r}"
        raise ValueError(msg)
    return f"redis+socket://{rest}" if scheme == "unix" else redis_url
