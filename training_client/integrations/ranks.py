"""One process of several asks, and all of them get its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from training_client.processes import world_size

T = TypeVar("T")


def on_rank_zero(ask: Callable[[], T]) -> T:
    """What `ask` returns or raises on rank 0, on every rank; elsewhere it is not called.

    All ranks must come here in the same order, as to an all-reduce.

    Args:
        ask: such as a question to the service; what it returns or raises can be pickled.
    """
    if world_size() == 1:
        return ask()
    outcome: list[Any] = [None]
    if distributed.get_rank() == 0:
        outcome = [_outcome(ask)]
    distributed.broadcast_object_list(outcome, src=0)
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]


def _outcome(ask: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return ask(), None
    except Exception as error:  # of any kind: the other ranks would wait for ever
        return None, error
