"""Loops that numba compiles for a processor, each in one pass over the numbers.

PyTorch goes over them once for every operation; on an accelerator that is how it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def on_processor(tensor: torch.Tensor) -> bool:
    """Whether a compiled loop can read it."""
    return tensor.is_cpu


@cache
def compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """The loop, compiled when it is first called with arrays of a kind.

    Sums may be added up in any order, so that a processor can keep several at a time; a division
    by 0 is ∞ or no number, as in PyTorch.
    """
    import numba

    found: Callable[..., Any] = numba.njit(error_model="numpy", fastmath={"reassoc", "contract"})(
        loop
    )
    return found
