"""The state of PyTorch's default random generators: of the CPU, and of the device of a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
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


class RandomStates:
    """The states of PyTorch's default random generators, to be restored.

    Args:
        device: of the model.
        all_generators: also those of Python and NumPy, which takes longer than a small operation.
    """

    def __init__(self, device: torch.device, *, all_generators: bool = False) -> None:
        self._device = device
        self._torch = torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._others = (random.getstate(), numpy.random.get_state()) if all_generators else None

    def __eq__(self, other: object) -> bool:
        """Return whether the generators were in the same states."""
        return isinstance(other, RandomStates) and self._numbers() == other._numbers()

    __hash__ = None  # type: ignore[assignment]

    def _numbers(self) -> list[object]:
        """Return the states as values that can be compared."""
        found: list[object] = [self._torch.tolist()]
        if self._of_device is not None:
            found.append(self._of_device.tolist())
        if self._others is not None:
            found += [self._others[0], *map(_as_plain, self._others[1])]
        return found

    def restore(self) -> None:
        """Let the generators draw again what they drew after this object was made."""
        torch.set_rng_state(self._torch)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self._device)
        if self._others is not None:
            random.setstate(self._others[0])
            numpy.random.set_state(self._others[1])


def _as_plain(part: object) -> object:
    """Return a part of NumPy's state as a value that can be compared."""
    return part.tolist() if isinstance(part, numpy.ndarray) else part
