"""A queue in which clients take turns: bounded work at once, in all and for each client."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from accountant_service.operations.problem import Problem

_RETRY: Final = {"Retry-After": "2"}


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits on the numbers of running and of waiting tasks in a `FairQueue`.

    Attributes:
        concurrent: tasks that run at the same time.
        concurrent_each: of these, tasks of one client.
        waiting: tasks that wait for their turn.
        waiting_each: of these, tasks of one client.
        seconds: the longest wait.
    """

    concurrent: int
    concurrent_each: int
    waiting: int
    waiting_each: int
    seconds: float = float("inf")


class FairQueue:
    """A queue that limits running tasks; clients with waiting tasks take turns.

    Args:
        limits: how many tasks may run, and how many may wait.
        refusal: the detail of the problem if too many tasks wait, or one waits too long.
    """

    def __init__(self, limits: QueueLimits, refusal: str) -> None:
        self._limits, self._refusal = limits, refusal
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Context manager that waits until a client may run a task, and counts the task as running.

        Raises:
            Problem: 503, too many tasks are waiting, or the turn did not come in time.
        """
        if self._may_run(client) and client not in self._waiting:
            self._running[client] += 1
        else:
            await self._wait_for_turn(client)
        try:
            yield
        finally:
            self._end_turn(client)

    def _may_run(self, client: str) -> bool:
        """Return whether one more task of this client is within the limits."""
        free = self._running.total() < self._limits.concurrent
        return free and self._running[client] < self._limits.concurrent_each

    async def _wait_for_turn(self, client: str) -> None:
        """Wait in a client's queue until it is the task's turn, or raise if it takes too long."""
        queue = self._waiting.get(client, deque())
        if len(queue) >= self._limits.waiting_each or self._waiting_count() >= self._limits.waiting:
            raise Problem(503, self._refusal, _RETRY)
        self._waiting[client] = queue
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(min(self._limits.seconds, 1e6)):
                await turn
        except BaseException as error:
            self._stop_waiting(client, turn)
            if isinstance(error, TimeoutError):
                raise Problem(503, self._refusal, _RETRY) from None
            raise

    def _waiting_count(self) -> int:
        """Return the number of waiting tasks of all clients."""
        return sum(map(len, self._waiting.values()))

    def _stop_waiting(self, client: str, turn: asyncio.Future[None]) -> None:
        """Remove a task that gave up waiting; if its turn had come, pass the turn on."""
        if turn.done() and not turn.cancelled():  # the turn came at the same moment
            self._end_turn(client)
            return
        queue = self._waiting.get(client)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[client]

    def _end_turn(self, client: str) -> None:
        """Count a client's task as ended, and let waiting tasks run."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._give_turns()

    def _give_turns(self) -> None:
        """Let waiting tasks run while the limits allow: one task of each client in turn."""
        while (client := next(filter(self._may_run, self._waiting), None)) is not None:
            self._give_turn(client)

    def _give_turn(self, client: str) -> None:
        """Let a client's first waiting task run, and move the client to the end of the queue."""
        queue = self._waiting.pop(client)
        turn = queue.popleft()
        if queue:
            self._waiting[client] = queue  # at the end: other clients come first
        if not turn.done():
            self._running[client] += 1
            turn.set_result(None)
