"""Whether this process trains alone: the engine here does not share its work out yet."""

from __future__ import annotations

import os

from torch import distributed

from training_client.errors import NoGuaranteeError


def world_size() -> int:
    """Return how many processes train together."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()


def require_one_process() -> None:
    """Return if no other process trains beside this one, or is said to.

    Each would draw its own batches of the same records, and its steps would be charged to nobody:
    of W runs one would be claimed.

    Raises:
        NoGuaranteeError: torch.distributed has several processes, or the launcher said so in
            WORLD_SIZE.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    processes = max(world_size(), int(launched) if launched.isdecimal() else 1)
    if processes > 1:
        raise NoGuaranteeError(
            f"{processes} processes train (torch.distributed, or WORLD_SIZE as torchrun sets it), "
            "and each would be a run of its own on the same records: start one process, or train "
            "with Opacus' DifferentiallyPrivateDistributedDataParallel (docs/how-to/frameworks.md)"
        )
