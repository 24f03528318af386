"""A worker's listener for Completions in this process, with an engine that a test holds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import UUID

from app.completions.line import PREFIX, Bell, Line
from app.completions.records import store_completion
from app.completions.spec import RequestSpec
from app.kit.db import Database
from app.kit.ids import new_uuid
from tests.fixtures.builders import Builders
from tests.worker.conftest import HeldEngine
from worker.completions import CompletionListener
from worker.engine.vectors import VectorCache
from worker.heartbeat import Speedometer
from worker.stopping import Stopping
from worker.vectors import VectorShelf

WAIT_SECONDS = 10.0


class Listening:
    """The listener, and what its clients do."""

    def __init__(self, database: Database, redis_url: str, builders: Builders) -> None:
        self.database = database
        self.line = Line(redis_url)
        self.bell = Bell(redis_url, waiting_max=8)
        self.builders = builders
        self.engine = HeldEngine()
        self.listener: CompletionListener | None = None

    def waits(self, account_id: UUID) -> bool:
        """Tell whether a choice of an account waits for a seat; nobody outside can see that."""
        assert self.listener is not None
        return account_id in self.listener._choices._seats._waiting

    def send(self, account_id: UUID, spec: RequestSpec, *, stream: bool = False) -> UUID:
        """Store a Completion and put it in line, as the API does."""
        completion_id = new_uuid()
        with self.database.transaction() as conn:
            store_completion(
                conn,
                account_id,
                completion_id,
                model="tiny",
                specs=[spec],
                seconds=60,
                stream=stream,
            )
        self.line.open_reader(completion_id)
        # Its client waits however slow the machine is; the API would say so again and again.
        self.line._redis.persist(f"{PREFIX}reader:{completion_id.hex}")
        self.line.put("tiny", completion_id)
        return completion_id

    def state(self, completion_id: UUID) -> str:
        with self.database.transaction() as conn:
            row = conn.execute(
                "SELECT state FROM completions WHERE id = %s", [completion_id]
            ).fetchone()
        assert row is not None
        return str(row["state"])

    def balance(self, account_id: UUID) -> tuple[int, int]:
        with self.database.transaction() as conn:
            row = conn.execute(
                "SELECT balance, held FROM accounts WHERE id = %s", [account_id]
            ).fetchone()
        assert row is not None
        return row["balance"], row["held"]

    def of(self, completion_id: UUID) -> int:
        """How many choices of a Completion the engine has."""
        return sum(key.startswith(completion_id.hex) for key in self.engine.inside)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_SECONDS
    while not condition():
        assert loop.time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(
    database: Database,
    redis_url: str,
    builders: Builders,
    folder: Path,
    *,
    logprob_entries_max: int = 1000,
) -> AsyncIterator[Listening]:
    """Run a listener for the length of the block."""
    made, stopping = Listening(database, redis_url, builders), Stopping(1)
    vectors = folder / "vectors"
    vectors.mkdir()
    listener = CompletionListener(
        database,
        redis_url,
        worker_id=builders.a_worker().worker_id,
        engine=made.engine,
        shelf=VectorShelf(database, VectorCache(vectors), vectors, 1 << 20),
        gate=None,  # type: ignore[arg-type]  # nothing comes unchecked here
        speed=Speedometer(),
        stopping=stopping,
        logprob_entries_max=logprob_entries_max,
    )
    made.listener = listener
    listener.start()
    try:
        yield made
    finally:
        stopping.request("the test ends")
        made.engine.gate.set()
        await listener.finish()
        made.line.close()
        await made.bell.close()
