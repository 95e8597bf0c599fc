"""A limit of the CPU time of computations that consist of many short parts.

Engines call `check_time` before each part of their work that takes milliseconds. So a computation
inside `limit_time` ends soon after its time is up, however many parts it has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_DEADLINE: Final[ContextVar[float]] = ContextVar("deadline", default=math.inf)


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Context manager that limits the CPU seconds of the code inside; nested limits all apply."""
    token = _DEADLINE.set(min(_DEADLINE.get(), time.process_time() + seconds))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_time() -> None:
    """Raise TimeoutError if the CPU time that `limit_time` allows is used up."""
    deadline = _DEADLINE.get()
    if deadline < math.inf and time.process_time() > deadline:
        raise TimeoutError("the computation ran out of CPU time")
