"""Calls to the service from distributed training: rank 0 asks, and all ranks get its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from training_client.private_step.single_process import world_size

T = TypeVar("T")


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, or trains alone."""
    return world_size() == 1 or distributed.get_rank() == 0


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result, or raise its exception, on all ranks.

    Like an all-reduce, it must be called on all ranks in the same order.

    Args:
        function: its result or exception must be picklable.
    """
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None]
    if distributed.get_rank() == 0:
        outcome = [_call_and_catch(function)]
    distributed.broadcast_object_list(outcome, src=0)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _call_and_catch(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call a function; return its result and None, or None and the exception."""
    try:
        return function(), None
    except Exception as error:  # any exception: the other ranks would wait forever
        return None, error
