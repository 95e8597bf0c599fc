"""Products of matrices, in the precision of their factors.

PyTorch has single precision multiplied by MKL, which leaves half the width of some processors'
arithmetic idle, and carries oneDNN beside it, which does not: the engine's products then take half
the time (`benchmarks/products.py`). Where there is no such width, MKL is a little faster. Both add
up in single precision, in an order of their own.

oneDNN compiles and keeps a program for every shape that it meets, and lots vary in size: a program
for each size would take more memory than the model. So examples are given to it in multiples of 64;
PyTorch's own product does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Final

import torch

_MULTIPLE: Final = 64  # of examples
_EXAMPLES: Final = 1024  # at a time, where more would leave the cache
_MULTIPLICATIONS: Final = 1 << 12  # an example: for fewer, calling takes longer than that saves
_SIDE: Final = 8  # of a matrix; a thinner one is a vector or two
_LOOSENED: Final = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")


def parts_of(left: torch.Tensor, right: torch.Tensor) -> list[slice]:
    """Some rows of the left one at a time, so that what is made of them stays in the cache."""
    size = len(left)
    if not left.is_cpu:
        return [slice(0, size)]
    whole = size - size % _MULTIPLE if _is_for_onednn(left, right, right.numel()) else size
    ends = sorted({*range(0, size, _EXAMPLES), whole, size})
    return [slice(*each) for each in pairwise(ends)]


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, of two matrices that no gradient is asked of.

    Args:
        left: one row an example.
        right: any.
    """
    if len(left) % _MULTIPLE or not _is_for_onednn(left, right, right.numel()):
        return left @ right
    return _by_onednn(left, right)


def weighted_product(
    left: torch.Tensor, right: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """leftᵀ @ diag(w) @ right, which adds up over the examples.

    Args:
        left: one row an example.
        right: likewise.
        weights: w, a number an example.
        out: takes it.
    """
    if left.shape[1] > right.shape[1]:  # the narrower one takes the weights
        weighted_product(right, left, weights, out.T)
        return
    whole = len(left) - len(left) % _MULTIPLE
    each = left.shape[1] * right.shape[1]
    if not _is_for_onednn(left[:whole].T, right[:whole], each):
        torch.mm(_weighted(left, weights), right, out=out)
        return
    out.copy_(_by_onednn(_weighted(left[:whole], weights[:whole]), right[:whole]))
    if whole < len(left):
        out.addmm_(_weighted(left[whole:], weights[whole:]), right[whole:])


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """rowsᵀ @ diag(w), one column an example."""
    return torch.mul(rows.T, weights, out=rows.new_empty(rows.shape[::-1]))


def _by_onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    multiply = _onednn()
    assert multiply is not None
    return multiply(left, right.T, None, "none", [], "")


def _is_for_onednn(left: torch.Tensor, right: torch.Tensor, each: int) -> bool:
    """In single precision on a processor, large enough, and as it likes them to lie in memory.

    Some others take it many times as long. How large, is counted by example: were it counted for
    all, one record could change how the sum of all the others is rounded.

    Args:
        left: a matrix.
        right: a matrix to multiply it by.
        each: multiplications an example.
    """
    return (
        left.dtype == right.dtype == torch.float32
        and left.is_cpu
        and min(*left.shape, right.shape[1]) >= _SIDE
        and each >= _MULTIPLICATIONS
        and _is_apart(left)
        and _is_dense(right)
        and _is_wide()
        and _onednn() is not None
    )


@cache
def _is_wide() -> bool:
    """Whether the processor has arithmetic that MKL leaves idle."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _is_apart(matrix: torch.Tensor) -> bool:
    """Whether rows, or columns, lie one after another; windows of a series overlap."""
    (rows, columns), (down, along) = matrix.shape, matrix.stride()
    return (along == 1 and down >= columns) or (down == 1 and along >= rows)


def _is_dense(matrix: torch.Tensor) -> bool:
    """Whether they do, and nothing lies between."""
    return matrix.is_contiguous() or matrix.T.is_contiguous()


@cache
def _onednn() -> Callable[..., torch.Tensor] | None:
    """PyTorch's call of it, if it has one, and whoever runs this did not ask for less precision."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not built or any(os.environ.get(name, "STRICT") != "STRICT" for name in _LOOSENED):
        return None
    found: Callable[..., torch.Tensor] | None
    found = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Products in the precision of their factors, whatever the model's forward pass ran in."""
    setting = _setting()
    if setting == "highest" and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # the others take as long as a small sum
    return _made_precise(device, setting)


def _setting() -> str | None:
    """PyTorch's for all devices; None if each has its own, for it then refuses to say."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def _made_precise(device: torch.device, setting: str | None) -> Iterator[None]:
    devices = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [each.fp32_precision for each in devices]
    if setting is not None:
        torch.set_float32_matmul_precision("highest")
    for each in devices:
        each.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if setting is not None:
            torch.set_float32_matmul_precision(setting)
        for each, value in zip(devices, before, strict=True):
            each.fp32_precision = value
