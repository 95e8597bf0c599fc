"""Numbers, flags and texts that the modules of a model keep, such as a count of their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn

_PLAIN: Final = (bool, int, float, str, type(None))

Numbers = Sequence[Mapping[str, Any]]  # of each module, by attribute


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
