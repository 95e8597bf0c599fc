"""The limit of CPU time that a caller of the package or of a command may set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accountant_service.errors import InvalidArgumentError, TooExpensiveError


@contextmanager
def limit_cpu_seconds(seconds: float | None) -> Iterator[None]:
    """Context manager that limits the CPU seconds of a computation inside; None does not.

    Raises:
        InvalidArgumentError: the limit is not above 0.
        TooExpensiveError: the time is up.
    """
    if seconds is None:
        yield
        return
    if not seconds > 0:
        raise InvalidArgumentError(("time_limit", f"must be above 0, not {seconds:g}"))
    from accountant_service.numerics.time_limit import limit_time

    try:
        with limit_time(seconds):
            yield
    except TimeoutError:
        raise TooExpensiveError(
            f"the computation needs more than the time limit of {seconds:g} s of CPU time: allow "
            "more, or use a larger tolerance, fewer different releases, or more noise"
        ) from None
