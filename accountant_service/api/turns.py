"""Who may work next: so many at once, so many of each asker, and the askers one after another."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from accountant_service.api.problems import Problem

_RETRY: Final = {"Retry-After": "2"}


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one kind of work there may be.

    Attributes:
        at_once: pieces of work at the same time.
        each: of these, for one asker.
        waiting: pieces that wait for their turn.
        waiting_each: of these, for one asker.
        seconds: the longest wait.
    """

    at_once: int
    each: int
    waiting: int
    waiting_each: int
    seconds: float = float("inf")


class Turns:
    """Turns at one kind of work. Askers who wait take turns, however much each of them asks.

    Args:
        limits: how much work at once, and how much waiting.
        refusal: what is told to those who come when too many wait already, or wait too long.
    """

    def __init__(self, limits: Limits, refusal: str) -> None:
        self._limits, self._refusal = limits, refusal
        self._working: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it.

        Raises:
            Problem: 503, too many wait already, or the turn did not come in time.
        """
        if self._may_work(who) and who not in self._waiting:
            self._working[who] += 1
        else:
            await self._wait(who)
        try:
            yield
        finally:
            self._leave(who)

    def _may_work(self, who: str) -> bool:
        free = self._working.total() < self._limits.at_once
        return free and self._working[who] < self._limits.each

    async def _wait(self, who: str) -> None:
        queue = self._waiting.get(who, deque())
        if len(queue) >= self._limits.waiting_each or self._count() >= self._limits.waiting:
            raise Problem(503, self._refusal, _RETRY)
        self._waiting[who] = queue
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(min(self._limits.seconds, 1e6)):
                await turn
        except BaseException as error:
            self._give_up(who, turn)
            if isinstance(error, TimeoutError):
                raise Problem(503, self._refusal, _RETRY) from None
            raise

    def _count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _give_up(self, who: str, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():  # it came at the same moment
            self._leave(who)
            return
        queue = self._waiting.get(who)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[who]

    def _leave(self, who: str) -> None:
        self._working[who] -= 1
        if not self._working[who]:
            del self._working[who]
        self._admit()

    def _admit(self) -> None:
        """Give free places to those who wait."""
        while (who := next(filter(self._may_work, self._waiting), None)) is not None:
            self._admit_one(who)

    def _admit_one(self, who: str) -> None:
        queue = self._waiting.pop(who)
        turn = queue.popleft()
        if queue:
            self._waiting[who] = queue  # at the end: the others come first
        if not turn.done():
            self._working[who] += 1
            turn.set_result(None)
