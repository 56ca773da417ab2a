"""`together`: waits for several coroutines and leaves no task behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of all calls. If one fails, end the others before its exception is raised."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
