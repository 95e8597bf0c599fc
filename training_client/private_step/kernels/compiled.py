"""Compiles loops for the CPU with numba, each of which reads its arrays once.

PyTorch reads them once per operation, which is what happens on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the CPU, where compiled loops can read it."""
    return tensor.is_cpu


@cache
def compile_loop(loop: Callable[..., None]) -> Callable[..., None]:
    """Compile a loop with numba; this happens when it is first called with arrays of a dtype.

    Sums may be reordered, so that the CPU can add several at a time; a division by 0 gives ∞ or
    NaN, as in PyTorch.
    """
    return compile_and_keep(loop, error_model="numpy", fastmath={"reassoc", "contract"})


def compile_and_keep(loop: Callable[..., Result], **options: Any) -> Callable[..., Result]:
    """Compile a loop with numba, and cache the result on disk for later processes.

    It is kept in `__pycache__` beside the loop's source file, or in the user's cache folder. Where
    neither can be written, every process compiles anew. numba compiles again when that file or the
    CPU changes, but not when only the options do: after that, run `make clean`.
    """
    import numba

    try:
        result: Callable[..., Result] = numba.njit(cache=True, **options)(loop)
    except RuntimeError:
        result = numba.njit(**options)(loop)
    return result
