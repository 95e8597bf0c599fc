"""Formulas element by element, each in one pass on a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from numpy import float64, isfinite, sqrt

from training_client.compiled import compiled, on_processor

_ALMOST_ZERO: Final = 1e-36  # squares beyond these ends count as the ends, so that the inverse
_ALMOST_INFINITE: Final = 1e36  # of their root is a number, and not 0


def inverse_roots(
    squares: torch.Tensor, factor: float = 1.0, epsilon: float = 0.0, least: float = 0.0
) -> torch.Tensor:
    """factor/(√max(s, least) + ε), finite and > 0 for all s; s may lie below 0, noise taken off.

    Args:
        squares: s; what is no number counts as a very large one.
        factor: > 0.
        epsilon: ε ≥ 0.
        least: at least 1e-36, and at most 1e36, for it is taken for that otherwise.
    """
    least = min(max(least, _ALMOST_ZERO), _ALMOST_INFINITE)
    if not _in_a_row(squares):
        known = squares.nan_to_num(_ALMOST_INFINITE).clamp_(least, _ALMOST_INFINITE)
        return known.sqrt_().add_(epsilon).reciprocal_().mul_(factor)
    found = torch.empty_like(squares)
    _run(_inverse_roots, (squares, found), (factor, epsilon, least, _ALMOST_INFINITE))
    return found


def affine(
    total: torch.Tensor,
    scale: torch.Tensor,
    shifted: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """t ← D∘(t + w·b) in place, and 0 for what is not finite then.

    With b it is done in double precision: what rounding leaves of w·b would point the same way for
    all records.

    Args:
        total: t.
        scale: D.
        shifted: b and w, a single number in double precision; None for b = 0.
    """
    if shifted is None:
        if _in_a_row(total, scale):
            _run(_scaled, (total, scale), ())
        else:
            total.mul_(scale).nan_to_num_(0.0, 0.0, 0.0)
        return
    shift, weight = shifted
    if _in_a_row(total, scale, shift):
        _run(_affine, (total, scale, shift, weight), ())
    else:
        mapped = (shift.double() * weight).add_(total).mul_(scale)
        total.copy_(mapped).nan_to_num_(0.0, 0.0, 0.0)


def moments(
    mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, variance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """∇ = u/D − b, and ∇² − v/D² as ((u − D∘b)² − v)/D².

    Args:
        mean: u.
        scale: D > 0.
        shift: b, or None for 0.
        variance: v.
    """
    if not _in_a_row(mean, scale, *(() if shift is None else (shift,))):
        u = mean if shift is None else mean - scale * shift
        return u / scale, (u * u).sub_(variance).div_(scale).div_(scale)
    gradient, square = torch.empty_like(mean), torch.empty_like(mean)
    shifts = () if shift is None else (shift,)
    loop = _moments if shift is None else _shifted_moments
    _run(loop, (mean, scale, *shifts, gradient, square), (variance,))
    return gradient, square


def sums_of_roots(squares: torch.Tensor, least: float) -> tuple[float, float]:
    """Σ √max(s, least) and Σ max(s, least), in double precision."""
    if not _in_a_row(squares):
        found = squares.double().clamp_min(least)
        return float(found.sqrt().sum()), float(found.sum())
    sums = torch.empty(2, dtype=torch.float64)
    compiled(_sums_of_roots)(squares.view(-1).numpy(), least, sums.numpy())
    return float(sums[0]), float(sums[1])


def over_root(
    gradient: torch.Tensor, mean_square: torch.Tensor, *, rate: float, epsilon: float
) -> torch.Tensor:
    """m ← (1 − rate)·m + rate·g², and g/√(m + ε): RMSprop, ε in the root.

    Args:
        gradient: g.
        mean_square: m, changed in place.
        rate: of what is new.
        epsilon: ε > 0.
    """
    if not _in_a_row(gradient, mean_square):
        mean_square.mul_(1 - rate).addcmul_(gradient, gradient, value=rate)
        return gradient / (mean_square + epsilon).sqrt_()
    found = torch.empty_like(gradient)
    _run(_over_root, (gradient, mean_square, found), (1 - rate, rate, epsilon))
    return found


def _in_a_row(*tensors: torch.Tensor) -> bool:
    """Whether a loop can go over them as they lie in memory."""
    return all(on_processor(each) and each.is_contiguous() for each in tensors)


def _run(
    loop: Callable[..., None], tensors: tuple[torch.Tensor, ...], numbers: tuple[float, ...]
) -> None:
    """A compiled pass over tensors of one shape and type, some of which it changes."""
    arrays = [each.numpy().reshape(-1) for each in tensors]
    assert {each.size for each in arrays} <= {arrays[0].size, 1}  # loops do not look at it
    kind = arrays[0].dtype.type
    compiled(loop)(*arrays, *[kind(each) for each in numbers])


def _inverse_roots(
    squares: Any, found: Any, factor: Any, epsilon: Any, least: Any, most: Any
) -> None:
    for i in range(len(squares)):
        square = squares[i] if squares[i] < most else most
        square = square if square > least else least
        found[i] = factor / (sqrt(square) + epsilon)


def _scaled(total: Any, scale: Any) -> None:
    for i in range(len(total)):
        u = total[i] * scale[i]
        total[i] = u if isfinite(u) else 0.0


def _affine(total: Any, scale: Any, shift: Any, weight: Any) -> None:
    for i in range(len(total)):
        u = (float64(total[i]) + weight[0] * float64(shift[i])) * float64(scale[i])
        total[i] = u
        total[i] = total[i] if isfinite(total[i]) else 0.0


def _moments(mean: Any, scale: Any, gradient: Any, square: Any, variance: Any) -> None:
    for i in range(len(mean)):
        gradient[i] = mean[i] / scale[i]
        square[i] = (mean[i] * mean[i] - variance) / scale[i] / scale[i]


def _shifted_moments(
    mean: Any, scale: Any, shift: Any, gradient: Any, square: Any, variance: Any
) -> None:
    for i in range(len(mean)):
        u = mean[i] - scale[i] * shift[i]
        gradient[i] = u / scale[i]
        square[i] = (u * u - variance) / scale[i] / scale[i]


def _sums_of_roots(squares: Any, least: Any, sums: Any) -> None:
    roots = total = 0.0
    for i in range(len(squares)):
        square = float64(squares[i])
        square = square if square > least else least
        total += square
        roots += sqrt(square)
    sums[0], sums[1] = roots, total


def _over_root(
    gradient: Any, mean_square: Any, found: Any, keep: Any, rate: Any, epsilon: Any
) -> None:
    for i in range(len(gradient)):
        mean_square[i] = keep * mean_square[i] + rate * gradient[i] * gradient[i]
        found[i] = gradient[i] / sqrt(mean_square[i] + epsilon)
