"""How the C library treats memory that a step has freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_KEPT: Final = 1 << 28
_FROM_THE_HEAP: Final = 1 << 25  # the most that glibc allows


def keep_freed_memory() -> None:
    """Keep up to 256 MiB that a step has freed for the next step.

    A step takes and frees tensors of the size of a layer's outputs. glibc gives them back to the
    system, which clears every page once more: up to a third of a small model's step. Where the C
    library is another one, nothing happens.
    """
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
        library.mallopt(_MMAP_THRESHOLD, _FROM_THE_HEAP)
