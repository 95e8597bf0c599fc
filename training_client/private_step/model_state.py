"""The state of a model besides its parameters: modes, random states, plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy
import torch
from torch import nn

_PLAIN: Final = (bool, int, float, str, type(None))

Numbers = Sequence[Mapping[str, Any]]  # of each module, by attribute


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each module afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


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


def numbers_of(model: nn.Module) -> Numbers:
    """Return what each module keeps."""
    return [
        {name: value for name, value in vars(each).items() if isinstance(value, _PLAIN)}
        for each in model.modules()
    ]


def restore_numbers(model: nn.Module, numbers: Numbers) -> None:
    """Let each module keep what it did when `numbers_of` was called."""
    for module, values in zip(model.modules(), numbers, strict=True):
        vars(module).update(values)
