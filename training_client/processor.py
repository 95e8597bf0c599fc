"""How a process that trains has its processor and the C library behave."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_KEPT: Final = 1 << 28
_FROM_THE_HEAP: Final = 1 << 25  # the most that glibc allows


@contextmanager
def fit_for_training() -> Iterator[None]:
    """Keep freed memory, and take numbers that are almost 0 for 0 until the training ends.

    Mean squares of what no longer changes fall below the smallest normal number, 1e-38 in single
    precision; a processor takes many times as long for those.
    """
    _keep_freed_memory()
    before = float(torch.full((1,), 1e-39) * 1.0) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _keep_freed_memory() -> None:
    """Keep up to 256 MiB that a step has freed for the next step.

    A step takes and frees tensors of the size of a layer's outputs. glibc gives them back to the
    system, which clears every page once more: up to a third of a small model's step. Where the C
    library is another one, nothing happens.
    """
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_MMAP_THRESHOLD, _FROM_THE_HEAP)
