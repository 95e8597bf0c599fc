"""Refuses to train in several processes that do not share one budget, and in forked ones."""

from __future__ import annotations

import os

from training_client.errors import NoGuaranteeError
from training_client.private_step.processes.process_group import world_size


def count_launched() -> int:
    """Return the number of processes that the launcher set in WORLD_SIZE; 1 if unset."""
    launched = os.environ.get("WORLD_SIZE", "")
    return int(launched) if launched.isdecimal() else 1


def require_one_process() -> None:
    """Raise if several processes train.

    Each would draw its own batches of the same records, and only one of the runs would be charged.

    Raises:
        NoGuaranteeError: torch.distributed has several processes, or the launcher set WORLD_SIZE
            to more than one.
    """
    processes = max(world_size(), count_launched())
    if processes > 1:
        raise NoGuaranteeError(
            f"{processes} processes train (torch.distributed, or WORLD_SIZE as torchrun sets it), "
            "and each would be a run of its own on the same records: start one process, or make "
            "one run of them with init_process_group and share_budget "
            "(docs/how-to/several-processes.md)"
        )


def require_same_process(process: int) -> None:
    """Raise unless this is the process with the given number, and no fork of it.

    Raises:
        NoGuaranteeError: it is another process.
    """
    if os.getpid() != process:
        raise NoGuaranteeError(
            "the optimizer belongs to this process's parent, which may make the same step: each "
            "would release its batch with noise of its own. Create the budget and the optimizer in "
            "the process that trains"
        )


def require_all_processes(size: int) -> None:
    """Raise unless the processes that share a budget are all that the launcher started.

    Args:
        size: the number of processes that share the budget.

    Raises:
        NoGuaranteeError: the launcher started more.
    """
    launched = count_launched()
    if launched > size:
        raise NoGuaranteeError(
            f"WORLD_SIZE says that {launched} processes train, but {size} share the budget: the "
            "others would be runs of their own on the same records. Call init_process_group in "
            "every process before share_budget"
        )
