"""The state of PyTorch's default random generators: of the CPU, and of the device of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of PyTorch's default generators of the CPU and a device."""
    state = torch.get_rng_state()
    if device.type != "cuda":
        return state
    return torch.cat([state, torch.cuda.get_rng_state(device)])


@contextmanager
def restored_random_state(device: torch.device) -> Iterator[None]:
    """Restore PyTorch's random state after the `with` block."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        yield
