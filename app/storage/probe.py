"""Whether the object store answers, asked without waiting for one that hangs.

A call to a store may take a minute before it fails; who looks after the service cannot wait so
long.
"""

import logging

from app.kit.question import Question
from app.storage.store import ObjectStore

log = logging.getLogger(__name__)

SECONDS_MAX = 3.0


class StoreProbe:
    """Asks one store; safe to share between threads."""

    def __init__(self, store: ObjectStore) -> None:
        """Prepare; nothing is asked before `answers`."""
        self._question = Question(store.check, name="store-probe")

    def answers(self, seconds: float = SECONDS_MAX) -> bool:
        """Say whether the store answers within `seconds`; why not is logged."""
        try:
            self._question.answer(seconds)
        except Exception as error:  # noqa: BLE001 (whatever a store raises, it is away)
            log.warning("the object store does not answer", extra={"error": repr(error)})
            return False
        return True
