"""Matrix products in the precision of their factors, by oneDNN or MKL.

PyTorch multiplies single precision with MKL, which does not use AVX-512 on some CPUs. It also ships
oneDNN, which does, and is twice as fast there (`benchmarks/matrix_products.py`). Without AVX-512,
MKL is a little faster. Both add up in single precision, each in an order of its own.

oneDNN compiles and keeps a program for every shape that it meets, and batches vary in size: a
program for each size would take more memory than the model. So examples are given to it in
multiples of 64; PyTorch's own product does the rest.

A weighted sum over examples is added up in single precision in blocks of a given number of
examples only, and their sums in double precision (`rounding_bounds` says why).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Final

import torch

_ROW_MULTIPLE: Final = 64  # of the examples that oneDNN is given
_ROWS_MAX: Final = 1024  # examples at a time: more would not stay in the cache
_MULTIPLICATIONS_MIN: Final = 1 << 12  # per example: for fewer, the call costs more than it saves
_SIDE_MIN: Final = 8  # rows and columns of a matrix
_PRECISION_VARIABLES: Final = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")


def cache_sized_slices(left: torch.Tensor, right: torch.Tensor) -> list[slice]:
    """Return slices of the rows of `left` for which the product with `right` fits in the cache."""
    size = len(left)
    if not left.is_cpu:
        return [slice(0, size)]
    whole = size - size % _ROW_MULTIPLE if _is_for_onednn(left, right, right.numel()) else size
    ends = sorted({*range(0, size, _ROWS_MAX), whole, size})
    return [slice(*each) for each in pairwise(ends)]


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right for matrices that need no gradients.

    Args:
        left: one row per example.
        right: the other matrix.
    """
    if len(left) % _ROW_MULTIPLE or not _is_for_onednn(left, right, right.numel()):
        return left @ right
    return _multiply_by_onednn(left, right)


def weighted_product(
    left: torch.Tensor, right: torch.Tensor, weights: torch.Tensor, block: int, out: torch.Tensor
) -> None:
    """Write the weighted sum of outer products Σ wᵢ·leftᵢ·rightᵢᵀ over rows i into `out`.

    Args:
        left: one row per example.
        right: likewise.
        weights: w, one per example.
        block: how many examples may be added up in the precision of the factors; 0 for products in
            double precision.
        out: receives the product, in double precision.
    """
    if left.shape[1] > right.shape[1]:  # weight the narrower one
        weighted_product(right, left, weights, block, out.T)
        return
    out.zero_()
    if block > _ROW_MULTIPLE:
        block -= block % _ROW_MULTIPLE
    for start in range(0, len(left), block or _ROWS_MAX):
        part = slice(start, start + (block or _ROWS_MAX))
        if block:
            _add_product(left[part], right[part], weights[part], out)
        else:
            factors = left[part].double(), weights[part].double()
            out.addmm_(_weight_columns(*factors), right[part].double())


def _add_product(
    left: torch.Tensor, right: torch.Tensor, weights: torch.Tensor, total: torch.Tensor
) -> None:
    """Add Σ wᵢ·leftᵢ·rightᵢᵀ, computed in the precision of the factors, to a total in double."""
    whole = len(left) - len(left) % _ROW_MULTIPLE
    if not _is_for_onednn(left[:whole].T, right[:whole], left.shape[1] * right.shape[1]):
        total += torch.mm(_weight_columns(left, weights), right)
        return
    total += _multiply_by_onednn(_weight_columns(left[:whole], weights[:whole]), right[:whole])
    if whole < len(left):
        total += torch.mm(_weight_columns(left[whole:], weights[whole:]), right[whole:])


def _weight_columns(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return rowsᵀ @ diag(weights): each example's row, weighted, as a column."""
    return torch.mul(rows.T, weights, out=rows.new_empty(rows.shape[::-1]))


def _multiply_by_onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices with oneDNN."""
    linear = _onednn_linear()
    assert linear is not None
    return linear(left, right.T, None, "none", [], "")


def _is_for_onednn(left: torch.Tensor, right: torch.Tensor, per_example: int) -> bool:
    """Return whether oneDNN probably multiplies these matrices faster than MKL does.

    They must be in single precision on a CPU, large enough, and without gaps or overlaps in memory:
    with other layouts oneDNN is many times slower. The size counts per example: if the number of
    examples mattered, one record could change how the sum of all others is rounded.

    Args:
        left: a matrix.
        right: a matrix to multiply it by.
        per_example: multiplications per example.
    """
    return (
        left.dtype == right.dtype == torch.float32
        and left.is_cpu
        and min(*left.shape, right.shape[1]) >= _SIDE_MIN
        and per_example >= _MULTIPLICATIONS_MIN
        and _has_no_overlap(left)
        and _is_gapless(right)
        and _has_avx512()
        and _onednn_linear() is not None
    )


@cache
def _has_avx512() -> bool:
    """Return whether the CPU has AVX-512 instructions.

    MKL does not use them on every CPU that has them, and oneDNN does.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _has_no_overlap(matrix: torch.Tensor) -> bool:
    """Return whether all entries of a matrix have their own memory, unlike in sliding windows."""
    (rows, columns), (down, along) = matrix.shape, matrix.stride()
    return (along == 1 and down >= columns) or (down == 1 and along >= rows)


def _is_gapless(matrix: torch.Tensor) -> bool:
    """Return whether a matrix, or its transpose, is contiguous in memory."""
    return matrix.is_contiguous() or matrix.T.is_contiguous()


@cache
def _onednn_linear() -> Callable[..., torch.Tensor] | None:
    """Return PyTorch's oneDNN product; None if missing, or if it would lower the precision."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not built or _is_precision_lowered():
        return None
    found: Callable[..., torch.Tensor] | None
    found = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


def are_convolutions_precise() -> bool:
    """Return whether oneDNN's convolutions have the full precision of their factors."""
    setting = torch.backends.mkldnn.conv.fp32_precision  # type: ignore[attr-defined]
    return setting in ("none", "ieee") and not _is_precision_lowered()


@cache
def _is_precision_lowered() -> bool:
    """Return whether the environment lets oneDNN round to a lower precision."""
    return any(os.environ.get(name, "STRICT") != "STRICT" for name in _PRECISION_VARIABLES)


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which matrix products have the full precision of their factors."""
    setting = _matmul_precision()
    if setting == "highest" and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # changing settings takes as long as a small sum
    return _forced_full_precision(device, setting)


def _matmul_precision() -> str | None:
    """Return PyTorch's precision setting; None if it differs between kinds of devices."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def _forced_full_precision(device: torch.device, setting: str | None) -> Iterator[None]:
    """Set full precision for matrix products, and no autocast, inside the `with` block."""
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
