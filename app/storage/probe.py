"""Whether the object store answers, asked without waiting for one that hangs.

A call to a store may take a minute before it fails; who looks after the service cannot wait so
long. One question is under way at a time: whoever asks meanwhile waits for the same answer.
"""

import logging
import threading
from concurrent.futures import Future

from app.storage.store import ObjectStore

log = logging.getLogger(__name__)

SECONDS_MAX = 3.0


class StoreProbe:
    """Asks one store; safe to share between threads."""

    def __init__(self, store: ObjectStore) -> None:
        """Prepare; nothing is asked before `answers`."""
        self._store = store
        self._lock = threading.Lock()
        self._asked: Future[None] | None = None

    def answers(self, seconds: float = SECONDS_MAX) -> bool:
        """Say whether the store answers within `seconds`; why not is logged."""
        with self._lock:
            if self._asked is None or self._asked.done():
                self._asked = Future()
                threading.Thread(
                    target=self._ask, args=(self._asked,), name="store-probe", daemon=True
                ).start()
            asked = self._asked
        try:
            asked.result(seconds)
        except Exception as error:  # noqa: BLE001 (whatever a store raises, it is away)
            log.warning("the object store does not answer", extra={"error": repr(error)})
            return False
        return True

    def _ask(self, asked: "Future[None]") -> None:
        try:
            self._store.check()
        except BaseException as error:  # noqa: BLE001 (who waits must hear of it)
            asked.set_exception(error)
        else:
            asked.set_result(None)
