"""Calls between processes that train together: rank 0 decides, and sums are added up over ranks.

Every call must be made by all processes in the same order, as every call of `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import torch
from torch import distributed

from training_client.errors import NoGuaranteeError, ProcessLostError

if distributed.is_available():
    # Functions of this module have the default process group as an argument's default. PyTorch
    # loads it with the first optimizer: then they hold the group for ever, destroy_process_group
    # does not end the threads of gloo, and Python may abort at its end. Load it before a group is.
    import torch.distributed.nn.functional

T = TypeVar("T")
_IS_ALONE: Final = ContextVar("is_alone", default=False)  # while a function runs on rank 0 only


def world_size() -> int:
    """Return the number of processes that train together through torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, or trains alone."""
    return world_size() == 1 or distributed.get_rank() == 0


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Call a function on rank 0 only; return its result, or raise its exception, on all ranks.

    Args:
        function: its result or exception must be picklable.
    """
    return ProcessGroup().run_on_rank_zero(function)


class ProcessGroup:
    """The processes that train together; after a failed call every further call is refused.

    A call fails if a process ended, or if one kept the others waiting for longer than the timeout
    of `init_process_group`. Its answer may come later, and would be taken for that of another call.

    Attributes:
        size: the number of processes; 1 without `torch.distributed`.
        rank: the number of this process, from 0.
    """

    def __init__(self) -> None:
        self.size = world_size()
        self.rank = distributed.get_rank() if self.size > 1 else 0
        self._problem: str | None = None  # why the group cannot be used any more

    def run_on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only; return its result, or raise its error, on all ranks.

        Args:
            function: its result or exception must be picklable.

        Raises:
            ProcessLostError: a process ended, or rank 0 answered too late.
        """
        if self.size == 1:
            return function()
        outcome: list[Any] = [None]
        with self.call():
            if self.rank == 0:
                outcome = [_call_alone(function)]
            distributed.broadcast_object_list(outcome, src=0)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor with that of rank 0, and return it."""
        if self.size > 1:
            with self.call():
                distributed.broadcast(tensor, src=0)
        return tensor

    def add_up(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with its sum over all processes (all-reduce)."""
        if self.size > 1:
            with self.call():
                distributed.all_reduce(tensor)

    def gather(self, numbers: Sequence[float], device: torch.device) -> torch.Tensor:
        """Return the numbers of all processes, one row for each, in double precision.

        Args:
            numbers: as many on every process.
            device: the device that the processes exchange tensors on.
        """
        own = torch.tensor(numbers, dtype=torch.float64, device=device)
        if self.size == 1:
            return own[None]
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with self.call():
            distributed.all_gather(rows, own)
        return torch.stack(rows)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context manager for one call of torch.distributed; report why it failed.

        Raises:
            NoGuaranteeError: the processes are not those that the group was made of.
            ProcessLostError: this or an earlier call failed.
        """
        if self._problem is not None:
            raise ProcessLostError(self._problem)
        if _IS_ALONE.get():
            raise NoGuaranteeError(
                "rank 0 alone calls this function, and the other processes would take its call for "
                "another: share the budget, and make steps, outside of it"
            )
        if world_size() != self.size or distributed.get_rank() != self.rank:
            raise NoGuaranteeError(
                f"the budget is shared by {self.size} processes, and {world_size()} train now: "
                "share the budget after init_process_group, once for each process group"
            )
        try:
            yield
        except RuntimeError as error:
            self._problem = (
                "a process that trains with this one ended, or kept it waiting for longer than the "
                f"timeout of init_process_group ({_first_line(error)}). This process makes no "
                "further step; a step that was charged stays charged. Start all processes again, "
                "from a checkpoint. If the accounting service answers late, use a timeout above "
                "the patience_seconds of the connection"
            )
            raise ProcessLostError(self._problem) from None


def _call_alone(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call a function; return its result and None, or None and its exception."""
    before = _IS_ALONE.set(True)
    try:
        return function(), None
    except Exception as error:  # any exception: the other ranks would wait forever
        return None, error
    finally:
        _IS_ALONE.reset(before)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a C++ stack trace."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].removesuffix(".")
