"""BodyTurns: the smallest of those that wait is next, and no turn is lost when somebody leaves."""

from __future__ import annotations

import asyncio

from kvbm.embedded.http.body_turns import BodyTurns


def test_the_smallest_of_those_that_wait_is_next_and_none_that_left() -> None:
    async def scenario() -> list[int]:
        turns, taken = BodyTurns(), []

        async def work(size: int) -> None:
            await turns.take(size)
            taken.append(size)
            await asyncio.sleep(0)
            turns.give_back()

        await turns.take(9)
        waiting = [asyncio.create_task(work(size)) for size in (5, 3, 1, 3, 2)]
        await asyncio.sleep(0)
        waiting[2].cancel()  # the one of size 1, while it waits
        await asyncio.sleep(0)
        turns.give_back()
        waiting[4].cancel()  # the one of size 2, which has got the turn and not run
        await asyncio.gather(*waiting, return_exceptions=True)
        await turns.take(0)
        return taken

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == [3, 3, 5]
