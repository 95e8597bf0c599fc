"""A pool of computation processes with a limit of CPU time for each computation.

Python runs one thread at a time, so a computation in the serving process would delay every other
request. Computation processes have a lower priority than the server.

A signal ends a computation that has used its CPU time. Python handles signals between two
instructions; the system kills a process that spends two more seconds within one instruction, and
the pool replaces it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

from accountant_service.computing.fork_server import FORK_SERVER
from accountant_service.errors import CodedError, TooExpensiveError
from accountant_service.numerics.laws.characteristic_function import tilted_loss
from accountant_service.numerics.laws.windowed_loss import cached_windowed_loss

_LOG: Final = logging.getLogger(__name__)
_SIGNAL_INTERVAL_SECONDS: Final = 0.1  # the signal is repeated, in case one is swallowed
_GRACE_SECONDS: Final = 2  # from the first signal to the kill
_DATA_BYTES_MAX: Final = 1 << 29
_EXITS_ABOVE_BYTES: Final = (
    160 << 20
)  # memory with which a process may go on to the next computation

Task = tuple[Callable[..., Any], tuple[Any, ...]]


class ReportedError(Exception):
    """Base class of errors that a computation process passes on to its caller."""


class ComputationFailedError(Exception):
    """A defect in a computation, described only by the error's type and place in the code."""


class ProcessPool:
    """A pool of up to `count` computation processes, started when they are first needed.

    Args:
        count: number of processes.
        seconds: CPU seconds allowed for one computation.
        niceness: how much lower their priority is than the server's.
    """

    def __init__(self, count: int, seconds: float, niceness: int) -> None:
        self._count, self._seconds, self._niceness = count, seconds, niceness
        self._idle: deque[_WorkerProcess] = deque()
        self._started: set[_WorkerProcess] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None  # each thread waits for one process

    def preload(self) -> None:
        """Start importing the modules that the processes share, in the background."""
        FORK_SERVER.start()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a module-level function in one of the processes, and return its result.

        Raises:
            TooExpensiveError: the computation used up its CPU time or memory.
            ComputationFailedError: it raised neither a `CodedError` nor a `ReportedError`.
        """
        if self._threads is None:
            self._closed = False
            self._threads = ThreadPoolExecutor(self._count, "computing")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._call_in_process, (function, arguments)
        )

    def _call_in_process(self, task: Task) -> Any:
        """Run a task in an idle or new process; remove the process if it died or will exit."""
        process = self._acquire_process()
        try:
            outcome = process.call(task)
        except (EOFError, OSError):
            self._kill(process)
            raise _create_limit_error(self._seconds) from None
        except BaseException:  # the task cannot be pickled, so nothing was sent
            self._idle.append(process)
            raise
        if outcome.exits:
            self._kill(process)
        else:
            self._idle.append(process)
        return outcome.result()

    def _acquire_process(self) -> _WorkerProcess:
        """Take an idle process, or start a new one."""
        with suppress(IndexError):
            return self._idle.pop()  # the last one used has the warmest caches
        process = _WorkerProcess(self._seconds, self._niceness)
        with self._lock:
            if not self._closed:
                self._started.add(process)
                return process
        process.kill()
        raise ComputationFailedError("the service is stopping")

    def _kill(self, process: _WorkerProcess) -> None:
        """Kill a process and remove it from the pool."""
        with self._lock:
            self._started.discard(process)
        process.kill()

    def close(self) -> None:
        """Kill the processes, even during a computation."""
        with self._lock:
            self._closed = True
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
        self._idle.clear()
        for process in list(self._started):
            self._kill(process)


class _WorkerProcess:
    """A process of the pool, with the connection to it."""

    def __init__(self, seconds: float, niceness: int) -> None:
        self._number, self._connection = FORK_SERVER.fork(f"{__name__}:compute", seconds, niceness)

    def call(self, task: Task) -> _Outcome:
        """Send a task to the process, and wait for its outcome."""
        self._connection.send(task)
        outcome: _Outcome = self._connection.recv()
        return outcome

    def kill(self) -> None:
        """Kill the process if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a computation: its return value or its exception.

    Attributes:
        value: the return value.
        error: the exception, if one was raised.
        exits: True if the process exits after this computation.
    """

    value: Any = None
    error: Exception | None = None
    exits: bool = False

    def result(self) -> Any:
        """Return the computed value, or raise the exception."""
        if self.error is not None:
            if isinstance(self.error, ComputationFailedError):
                _LOG.error("a computation failed: %s", self.error)
            raise self.error
        return self.value


# --- inside a computation process


class _DeadlineError(BaseException):
    """Raised when the CPU time is used up; `except Exception` does not catch it."""


def compute(connection: Connection, seconds: float, niceness: int) -> None:
    """Run the tasks that arrive on a connection, until the parent process closes it."""
    os.nice(niceness)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_DATA, _DATA_BYTES_MAX)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        outcome = _run_task(function, arguments, seconds)
        try:
            connection.send(outcome)
        except BrokenPipeError:
            return
        if outcome.exits:
            return


def _run_task(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> _Outcome:
    """Run one task within the CPU limit, and return its value or exception."""
    try:
        with _cpu_deadline(seconds):
            outcome = _Outcome(function(*arguments))
    except (_DeadlineError, MemoryError):
        return _Outcome(error=_create_limit_error(seconds), exits=True)
    except Exception as error:
        outcome = _Outcome(error=error if _can_be_sent(error) else _describe_without_values(error))
    return replace(outcome, exits=not _reduce_memory())


def _create_limit_error(seconds: float) -> TooExpensiveError:
    """Return the error of a computation that exceeds its CPU time or memory."""
    return TooExpensiveError(
        f"the computation needs more than {seconds:g} s of CPU time or "
        f"{_DATA_BYTES_MAX >> 20} MiB of memory: use a larger tolerance, fewer different "
        "releases, or more noise"
    )


def _can_be_sent(error: Exception) -> bool:
    """Return whether an error is meant for the caller and can be pickled."""
    try:
        return isinstance(error, CodedError | ReportedError) and bool(pickle.dumps(error))
    except Exception:
        return False


def _describe_without_values(error: Exception) -> ComputationFailedError:
    """Return an error that names the type and stack frames of another one, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{each.filename}:{each.lineno} {each.name}" for each in reversed(frames))
    return ComputationFailedError(f"{type(error).__name__} at {places}")


@contextmanager
def _cpu_deadline(seconds: float) -> Iterator[None]:
    """Context manager that raises `_DeadlineError` after a number of seconds of CPU time."""
    armed = True

    def raise_deadline_error(_: int, __: Any) -> None:
        """Signal handler: raise `_DeadlineError`."""
        if armed:
            raise _DeadlineError

    signal.signal(signal.SIGPROF, raise_deadline_error)
    used_seconds = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _set_limit(resource.RLIMIT_CPU, math.ceil(used_seconds + seconds) + _GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, seconds, _SIGNAL_INTERVAL_SECONDS)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def _set_limit(kind: int, value: int) -> None:
    """Set a soft resource limit of this process; it can be raised again later."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _reduce_memory() -> bool:
    """Free memory if this process is large; return whether it may compute further tasks.

    The caches of large laws are emptied. The caches of answers stay, because a question for more
    digits starts from them.
    """
    if _resident_bytes() <= _EXITS_ABOVE_BYTES:
        return True
    cached_windowed_loss.cache_clear()
    tilted_loss.cache_clear()
    gc.collect()
    with suppress(OSError, AttributeError):  # the C library keeps freed memory, and not all trim
        ctypes.CDLL(None).malloc_trim(0)
    return _resident_bytes() <= _EXITS_ABOVE_BYTES


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes, or 0 if it is unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0
