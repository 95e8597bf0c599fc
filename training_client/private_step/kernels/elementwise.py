"""Elementwise formulas, each computed in one pass on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from numpy import float64, isfinite, sqrt

from training_client.private_step.blocks import Piece
from training_client.private_step.kernels.compiled import compile_loop, is_on_cpu

_SQUARE_MIN: Final = 1e-36  # squares are clamped to this range, so that the inverse of their
_SQUARE_MAX: Final = 1e36  # root is finite and > 0
_DOUBLES_MAX: Final = 1 << 20  # numbers that are copied in double precision at a time


@dataclass(frozen=True, slots=True)
class AffineMap:
    """A shift, then a scale, of some of a gradient's coordinates.

    Attributes:
        scale: D; None for 1.
        shift: b; None for 0, as it is without a scale.
    """

    scale: torch.Tensor | None
    shift: torch.Tensor | None = None

    def for_piece(self, piece: Piece) -> AffineMap:
        """Return the part of a block's map for one parameter's rows, in the rows' shape."""
        scale = None if self.scale is None else piece.view_in(self.scale)
        return AffineMap(scale, None if self.shift is None else piece.view_in(self.shift))

    def as_row(self) -> AffineMap:
        """Return the map with scale and shift reshaped to matrices of one row."""
        scale = None if self.scale is None else self.scale.reshape(1, -1)
        return AffineMap(scale, None if self.shift is None else self.shift.reshape(1, -1))

    def map_sum(self, total: torch.Tensor, weights: torch.Tensor) -> None:
        """Scale and shift a weighted sum in place, as if gradients had been mapped before summing.

        Args:
            total: Σ wᵢ∇ᵢ, in double precision; what is not finite, or becomes so, is set to 0.
            weights: w, which are added up in double precision.
        """
        if self.scale is not None:
            shifted = None if self.shift is None else (self.shift, weights.sum(dtype=torch.float64))
            map_in_place(total, self.scale, shifted)

    def gradient_moments(
        self, mean: torch.Tensor, noise_deviation: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimate the mean gradient and its square from a noisy mean of mapped gradients.

        Args:
            mean: the noisy mean of u.
            noise_deviation: the standard deviation of the noise on each coordinate of it.

        Returns:
            ∇ = u/D − b, and ∇² less the variance of its noise. The square may be negative: were it
            cut off at 0, averages of it would keep half of the noise.
        """
        if self.scale is None:
            return mean, (mean * mean).sub_(noise_deviation**2)
        return gradient_moments(mean, self.scale, self.shift, noise_deviation**2)


def inverse_square_roots(
    squares: torch.Tensor, factor: float = 1.0, epsilon: float = 0.0, least: float = 0.0
) -> torch.Tensor:
    """Return factor/(√max(s, least) + ε) for each s in `squares`; always finite and positive.

    Args:
        squares: s; may be negative, as estimates with the noise variance subtracted are; NaN counts
            as 1e36.
        factor: > 0.
        epsilon: ε ≥ 0.
        least: clamped to 1e-36 … 1e36.
    """
    least = min(max(least, _SQUARE_MIN), _SQUARE_MAX)
    if not _is_contiguous(squares):
        known = squares.nan_to_num(_SQUARE_MAX).clamp_(least, _SQUARE_MAX)
        return known.sqrt_().add_(epsilon).reciprocal_().mul_(factor)
    result = torch.empty_like(squares)
    _run_loop(_inverse_square_roots, (squares, result), (factor, epsilon, least, _SQUARE_MAX))
    return result


def map_in_place(
    total: torch.Tensor,
    scale: torch.Tensor,
    shifted: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Shift and scale a weighted gradient sum in place; set non-finite values to 0.

    Args:
        total: t, in double precision.
        scale: D.
        shifted: b, and w as a one-element tensor in double precision; None for b = 0.
    """
    if shifted is None:
        if _is_contiguous(total, scale):
            _run_loop(_map_without_shift, (total, scale), ())
        else:
            total.mul_(scale).nan_to_num_(0.0, 0.0, 0.0)
        return
    shift, weight = shifted
    if _is_contiguous(total, scale, shift):
        _run_loop(_map_with_shift, (total, scale, shift, weight), ())
    else:
        mapped = (shift.double() * weight).add_(total).mul_(scale)
        total.copy_(mapped).nan_to_num_(0.0, 0.0, 0.0)


def gradient_moments(
    mean: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, variance: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the mean gradient and its square from the noisy mean of scaled, shifted gradients.

    The scale and shift are undone, and the variance of the noise is subtracted from the square.

    The square is computed as ((u − D∘b)² − v)/D².

    Args:
        mean: u.
        scale: D > 0.
        shift: b, or None for 0.
        variance: v, of the noise on u.
    """
    if not _is_contiguous(mean, scale, *(() if shift is None else (shift,))):
        u = mean if shift is None else mean - scale * shift
        return u / scale, (u * u).sub_(variance).div_(scale).div_(scale)
    gradient, square = torch.empty_like(mean), torch.empty_like(mean)
    shifts = () if shift is None else (shift,)
    loop = _gradient_moments if shift is None else _shifted_gradient_moments
    _run_loop(loop, (mean, scale, *shifts, gradient, square), (variance,))
    return gradient, square


def sum_square_roots(squares: torch.Tensor, least: float) -> tuple[float, float]:
    """Return two sums over all s in `squares`: of √max(s, least) and of max(s, least)."""
    if not _is_contiguous(squares):
        sums = squares.new_zeros(2, dtype=torch.float64)
        for part in torch.split(squares.reshape(-1), _DOUBLES_MAX):
            exact = part.double().clamp_min(least)
            sums += torch.stack([exact.sqrt().sum(), exact.sum()])
    else:
        sums = torch.empty(2, dtype=torch.float64)
        compile_loop(_sum_square_roots)(squares.view(-1).numpy(), least, sums.numpy())
    of_roots, of_squares = sums.tolist()
    return of_roots, of_squares


def rmsprop_update(
    gradient: torch.Tensor, mean_square: torch.Tensor, *, rate: float, epsilon: float
) -> torch.Tensor:
    """Update RMSprop's mean square m in place; return the preconditioned gradient/√(m + ε).

    The update is m ← (1 − rate)·m + rate·g².

    Args:
        gradient: g.
        mean_square: m, changed in place.
        rate: the weight of g².
        epsilon: ε > 0.
    """
    if not _is_contiguous(gradient, mean_square):
        mean_square.mul_(1 - rate).addcmul_(gradient, gradient, value=rate)
        return gradient / (mean_square + epsilon).sqrt_()
    result = torch.empty_like(gradient)
    _run_loop(_rmsprop_update, (gradient, mean_square, result), (1 - rate, rate, epsilon))
    return result


def _is_contiguous(*tensors: torch.Tensor) -> bool:
    """Return whether all tensors are on the CPU and contiguous, so that a loop can read them."""
    return all(is_on_cpu(each) and each.is_contiguous() for each in tensors)


def _run_loop(
    loop: Callable[..., None], tensors: tuple[torch.Tensor, ...], numbers: tuple[float, ...]
) -> None:
    """Run a compiled loop over tensors of one shape, some of which it changes."""
    arrays = [each.numpy().reshape(-1) for each in tensors]
    assert {each.size for each in arrays} <= {arrays[0].size, 1}  # loops do not check it
    dtype = arrays[0].dtype.type
    compile_loop(loop)(*arrays, *[dtype(each) for each in numbers])


def _inverse_square_roots(
    squares: Any, result: Any, factor: Any, epsilon: Any, least: Any, most: Any
) -> None:
    """Write factor/(√s + ε) to `result`, each s in `squares` limited to [least, most]."""
    for i in range(len(squares)):
        square = squares[i] if squares[i] < most else most
        square = square if square > least else least
        result[i] = factor / (sqrt(square) + epsilon)


def _map_without_shift(total: Any, scale: Any) -> None:
    """Multiply `total` by `scale` in place; non-finite values become 0."""
    for i in range(len(total)):
        u = total[i] * scale[i]
        total[i] = u if isfinite(u) else 0.0


def _map_with_shift(total: Any, scale: Any, shift: Any, weight: Any) -> None:
    """Compute (total + weight·shift)·scale in place; non-finite values become 0."""
    for i in range(len(total)):
        u = (float64(total[i]) + weight[0] * float64(shift[i])) * float64(scale[i])
        total[i] = u
        total[i] = total[i] if isfinite(total[i]) else 0.0


def _gradient_moments(mean: Any, scale: Any, gradient: Any, square: Any, variance: Any) -> None:
    """Write mean/scale to `gradient`, and (mean² − variance)/scale² to `square`."""
    for i in range(len(mean)):
        gradient[i] = mean[i] / scale[i]
        square[i] = (mean[i] * mean[i] - variance) / scale[i] / scale[i]


def _shifted_gradient_moments(
    mean: Any, scale: Any, shift: Any, gradient: Any, square: Any, variance: Any
) -> None:
    """Write u/scale to `gradient`, (u² − variance)/scale² to `square`; u = mean − scale·shift."""
    for i in range(len(mean)):
        u = mean[i] - scale[i] * shift[i]
        gradient[i] = u / scale[i]
        square[i] = (u * u - variance) / scale[i] / scale[i]


def _sum_square_roots(squares: Any, least: Any, sums: Any) -> None:
    """Write the sums of √max(s, least) and max(s, least) to `sums`, in double precision."""
    roots = total = 0.0
    for i in range(len(squares)):
        square = float64(squares[i])
        square = square if square > least else least
        total += square
        roots += sqrt(square)
    sums[0], sums[1] = roots, total


def _rmsprop_update(
    gradient: Any, mean_square: Any, result: Any, keep: Any, rate: Any, epsilon: Any
) -> None:
    """Update `mean_square` m to keep·m + rate·g² for gradient g; write g/√(m + ε) to `result`."""
    for i in range(len(gradient)):
        mean_square[i] = keep * mean_square[i] + rate * gradient[i] * gradient[i]
        result[i] = gradient[i] / sqrt(mean_square[i] + epsilon)
