"""Computations in processes of their own, each with a deadline in CPU time.

Python runs one thread at a time, so a computation in the serving process would delay every other
request. Computation processes have a lower priority than the server.

The deadline is a signal after so many seconds of CPU time. Python handles signals between two
instructions; a process that spends two seconds more within one of them is killed by the system,
and replaced.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import resource
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from accountant_service.errors import AccountingError, TooExpensiveError
from accountant_service.forking import FORK_SERVER

_LOG: Final = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 0.1  # between two signals, should the first be swallowed
_GRACE_SECONDS: Final = 2  # from the first signal to the kill
_DATA_BYTES_MAX: Final = 1 << 29
_RETIRES_AT_BYTES: Final = 160 << 20  # what a process may keep from one computation to the next

Task = tuple[Callable[..., Any], tuple[Any, ...]]


class AnswerError(Exception):
    """An error that is an answer, besides `AccountingError`: it reaches whoever asked."""


class ComputationFailedError(Exception):
    """A fault in a computation, as its type and its place in the code: no value is quoted."""


class Processes:
    """Up to `count` computation processes, started when they are first needed.

    Args:
        count: how many compute at the same time.
        seconds: CPU time of one computation.
        niceness: by how much their priority is lower than the server's.
    """

    def __init__(self, count: int, seconds: float, niceness: int) -> None:
        self._count, self._seconds, self._niceness = count, seconds, niceness
        self._idle: deque[_Process] = deque()
        self._started: set[_Process] = set()
        self._turn = threading.Lock()
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None  # each waits for one process

    def prepare(self) -> None:
        """Import what the processes share, in the background."""
        FORK_SERVER.start()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module in one of the processes and return what it returns.

        Raises:
            TooExpensiveError: the computation used up its CPU time or memory.
            ComputationFailedError: it raised neither an `AccountingError` nor an `AnswerError`.
        """
        if self._threads is None:
            self._closed = False
            self._threads = ThreadPoolExecutor(self._count, "computing")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, (function, arguments))

    def _call(self, task: Task) -> Any:
        process = self._take()
        try:
            outcome = process.call(task)
        except (EOFError, OSError):
            self._end(process)
            raise _too_expensive(self._seconds) from None
        except BaseException:  # nothing was sent: the task cannot be pickled
            self._idle.append(process)
            raise
        if outcome.retires:
            self._end(process)
        else:
            self._idle.append(process)
        return outcome.result()

    def _take(self) -> _Process:
        with suppress(IndexError):
            return self._idle.pop()  # the last one used has the warmest caches
        process = _Process(self._seconds, self._niceness)
        with self._turn:
            if not self._closed:
                self._started.add(process)
                return process
        process.kill()
        raise ComputationFailedError("the service stops")

    def _end(self, process: _Process) -> None:
        with self._turn:
            self._started.discard(process)
        process.kill()

    def close(self) -> None:
        """Kill the processes, whatever they compute."""
        with self._turn:
            self._closed = True
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        self._idle.clear()
        for process in list(self._started):
            self._end(process)


class _Process:
    """A process that computes one task after another."""

    def __init__(self, seconds: float, niceness: int) -> None:
        self._number, self._connection = FORK_SERVER.fork(seconds, niceness)

    def call(self, task: Task) -> _Outcome:
        self._connection.send(task)
        outcome: _Outcome = self._connection.recv()
        return outcome

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a computation returned or raised.

    Attributes:
        value: what it returned.
        error: what it raised, if it did.
        retires: whether the process ends now.
    """

    value: Any = None
    error: Exception | None = None
    retires: bool = False

    def result(self) -> Any:
        if self.error is not None:
            if isinstance(self.error, ComputationFailedError):
                _LOG.error("a computation failed: %s", self.error)
            raise self.error
        return self.value


# --- inside a computation process


class _DeadlineError(BaseException):
    """The CPU time is used up; no `except Exception` catches it."""


def compute(connection: Connection, seconds: float, niceness: int) -> None:
    """Compute one task after another, until the server closes the connection."""
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the server to end this
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, _DATA_BYTES_MAX)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        outcome = _outcome(function, arguments, seconds)
        try:
            connection.send(outcome)
        except BrokenPipeError:
            return
        if outcome.retires:
            return


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> _Outcome:
    try:
        with _deadline(seconds):
            value = function(*arguments)
        return _Outcome(value, retires=_resident_bytes() > _RETIRES_AT_BYTES)
    except (_DeadlineError, MemoryError):
        return _Outcome(error=_too_expensive(seconds), retires=True)
    except Exception as error:
        return _Outcome(error=error if _travels(error) else _described(error))


def _too_expensive(seconds: float) -> TooExpensiveError:
    return TooExpensiveError(
        f"the computation needs more than {seconds:g} s of CPU time, or more than "
        f"{_DATA_BYTES_MAX >> 20} MiB of memory: ask for a larger tolerance, for fewer different "
        "releases, or for more noise"
    )


def _travels(error: Exception) -> bool:
    """Whether an error is part of an answer, and can be sent."""
    try:
        return isinstance(error, AccountingError | AnswerError) and bool(pickle.dumps(error))
    except Exception:
        return False


def _described(error: Exception) -> ComputationFailedError:
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{each.filename}:{each.lineno} {each.name}" for each in reversed(frames))
    return ComputationFailedError(f"{type(error).__name__} at {places}")


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_DeadlineError` after so many seconds of CPU time."""
    armed = True

    def stop(_: int, __: Any) -> None:
        if armed:
            raise _DeadlineError

    signal.signal(signal.SIGPROF, stop)
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _limit(resource.RLIMIT_CPU, math.ceil(used + seconds) + _GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(kind: int, value: int) -> None:
    """Lower the soft limit, which may be raised again."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0
