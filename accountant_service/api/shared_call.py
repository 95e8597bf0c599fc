"""A call that is made once for all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SharedCall(Generic[Result]):
    """A call that runs at most once at a time, however many ask for it.

    Callers that ask while it runs share the next run, so every answer was computed after its
    question.

    Args:
        call: what is run.
    """

    def __init__(self, call: Callable[[], Awaitable[Result]]) -> None:
        self._call = call
        self._running: asyncio.Future[Result] | None = None
        self._next: asyncio.Future[Result] | None = None

    async def __call__(self) -> Result:
        """Return the result of a run that begins from now on, or raise its exception."""
        if self._next is None or self._next.done():
            self._next = asyncio.ensure_future(self._run_after(self._running))
        return await asyncio.shield(self._next)

    async def _run_after(self, previous: asyncio.Future[Result] | None) -> Result:
        """Run the call once the previous run has ended."""
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        self._running, self._next = self._next, None
        return await self._call()
