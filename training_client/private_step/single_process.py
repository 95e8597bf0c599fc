"""Refuses to train in several processes: private steps are not shared among processes."""

from __future__ import annotations

import os

from torch import distributed

from training_client.errors import NoGuaranteeError


def world_size() -> int:
    """Return the number of processes that train together through torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def require_one_process() -> None:
    """Raise if several processes train together.

    Each would draw its own batches of the same records, and only one of the runs would be charged.

    Raises:
        NoGuaranteeError: torch.distributed has several processes, or the launcher set WORLD_SIZE
            to more than one.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    processes = max(world_size(), int(launched) if launched.isdecimal() else 1)
    if processes > 1:
        raise NoGuaranteeError(
            f"{processes} processes train (torch.distributed, or WORLD_SIZE as torchrun sets it), "
            "and each would be a run of its own on the same records: start one process, or train "
            "with Opacus' DifferentiallyPrivateDistributedDataParallel (docs/how-to/frameworks.md)"
        )
