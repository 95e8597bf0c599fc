"""The places of examples in a tensor, read off its memory: so views need no rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch


class Place(NamedTuple):
    """The dimension of a tensor that runs over the examples, and how it is folded.

    The dimension has outer · B · inner entries for B examples, and entry i is of example
    (i // inner) mod B.

    Attributes:
        dim: the dimension, from 0.
        outer: how many whole batches stand one after another.
        inner: how many neighbouring entries are of one example.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, count: int) -> int:
        """Return how many entries the dimension has for `count` examples."""
        return self.outer * count * self.inner


@lru_cache(maxsize=1 << 14)
def find_place(
    size: torch.Size, stride: tuple[int, ...], offset: int, step: int, count: int
) -> Place | None:
    """Return where a view of a storage has its examples; None if it pairs them in another way.

    The storage's element at offset o is of example (o // step) mod count.

    Args:
        size: of the view.
        stride: of the view.
        offset: of the view, in the storage.
        step: see above.
        count: the number of examples, at least two.
    """
    within, place = offset % step, None  # the farthest that a row reaches within its example
    if (offset // step) % count:
        return None  # it begins with another example than the first
    for dim, (length, jump) in enumerate(zip(size, stride, strict=True)):
        if length == 1 or jump % (step * count) == 0:
            continue  # moves by whole batches, or not at all
        inner = step // jump if step % jump == 0 else 0
        if place is None and inner and length % (count * inner) == 0:
            place, length = Place(dim, length // (count * inner), inner), inner
        within += (length - 1) * jump
    return place if within < step else None


def rows_of_examples(tensor: torch.Tensor, dim: int, place: Place, count: int) -> torch.Tensor:
    """Return a view with a dimension `dim` + 1 that runs over the examples alone."""
    found: torch.Tensor = tensor.unflatten(dim, (place.outer, count, place.inner))  # type: ignore[no-untyped-call]
    return found


def are_equal_along(rows: torch.Tensor, dim: int) -> bool:
    """Return whether all slices of a tensor along a dimension are equal, but for rounding."""
    return is_close(rows, rows.narrow(dim, 0, 1))


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether values are equal up to the rounding of a few operations; NaN equals NaN.

    Each is compared by itself: beside −∞, or a mask's −1e9, small values matter as much.
    """
    one, other = one.detach(), other.detach()
    if not (one.is_floating_point() or one.is_complex()):
        return bool((one == other).all())
    rounding = 64 * torch.finfo(one.dtype).eps
    return bool(torch.isclose(one, other, rtol=rounding, atol=0.0, equal_nan=True).all())


def counts_up(index: torch.Tensor, count: int) -> bool:
    """Return whether the values of an index are 0, 1, … count − 1 along one dimension."""
    if index.numel() != count or max(index.shape, default=0) != count:
        return False
    return torch.equal(index.flatten(), torch.arange(count, device=index.device, dtype=index.dtype))


def removed_before(dims: Sequence[int], dim: int) -> int:
    """Return how many of some dimensions are before another."""
    return sum(each < dim for each in dims)
