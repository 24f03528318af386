"""The task that sends tokens: nothing that goes wrong in one round ends it."""

import asyncio
from functools import partial

from app.completions.line import Line
from app.completions.records import ClaimedCompletion
from app.kit.ids import new_uuid
from tests.fixtures.builders import a_spec
from worker.completion_stream import NO_BROKER, TokenSender
from worker.engine.protocol import Piece


def test_a_round_that_breaks_fails_its_streams_and_not_the_next_ones(redis_url):
    line = Line(redis_url)
    rounds = 0

    async def in_thread(work):
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            msg = "no thread can be started"
            raise RuntimeError(msg)
        return work()

    async def two_streams():
        sender = TokenSender(line, in_thread)
        sending = asyncio.ensure_future(sender.run())
        failures, told = [], []
        for _ in range(2):
            claimed = ClaimedCompletion(new_uuid(), new_uuid(), (a_spec(),), stream=True)
            stream = sender.open(claimed, partial(told.append, claimed.id))
            stream.give(0, Piece(0, "a", (5,), None))
            await asyncio.wait_for(stream.sent(), 5)
            failures.append(stream.failure)
            sender.close(stream)
        sending.cancel()
        return failures, len(told)

    failures, told = asyncio.run(two_streams())
    line.close()
    assert failures == [NO_BROKER, None]
    assert told == 1
