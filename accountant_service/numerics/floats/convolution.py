"""Convolution of lattice masses by FFT, with a proved bound on the rounding error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import fft

from accountant_service.numerics.floats.special_functions import Array, lattice_points
from accountant_service.numerics.time_limit import check_time

_LOG_SIZE_MAX: Final = 50.0  # of a transform of masses, which may sum to a little more than 1
_UNDERFLOW: Final = 1e-300  # replaces a transform that underflows
_POINTS_MAX: Final = 1 << 22  # points times different masses, beyond which a coarser bound is used
BLOCKS_MAX: Final = 4096  # of lattice points, for exponential moments


@dataclass(frozen=True, slots=True)
class LatticeMasses:
    """Probabilities of equally spaced privacy losses of a release, and how often it is repeated.

    Attributes:
        first: index of the first lattice point.
        mass: at each lattice point from there on.
        count: number of repetitions.
    """

    first: int
    mass: Array
    count: int


def convolve(
    steps: Sequence[LatticeMasses], first: int, size: int, *, extended: bool = False
) -> tuple[Array, float]:
    """Convolve repeated releases' masses by FFT; return `size` masses and an error bound.

    Mass outside the window is wrapped around into it.

    Transforms are computed in doubles, or in the longest floating-point numbers of the machine,
    `extended`: 64 bits of 53 on x86, which takes about four times as long.

    Errors: a transform of N points has 2-norm error at most η = 7·eps·log₂N relative to its
    result (Higham, *Accuracy and Stability*, Theorem 24.2, with room). An error e in φᵢ grows to
    count·|Φ/φᵢ|·e; by Cauchy–Schwarz a point of the inverse transform is then off by at most
    Σᵢ countᵢ·‖pᵢ‖₂·‖Φ/φᵢ‖₂/√N·η, and powers and products add a few eps·count of ‖Φ‖₂/√N.
    """
    number = np.longdouble if extended else np.float64
    eps = float(np.finfo(number).eps)
    log_size, log_parts, angle = _transform(
        steps, size, number, keep=size * len(steps) <= _POINTS_MAX
    )
    mass = _invert(log_size, angle, steps, first, size)
    eta = 7 * eps * math.log2(size)
    total_norm = _norm_from_transform(np.exp(np.minimum(log_size, _LOG_SIZE_MAX)), size)
    error = eta * total_norm
    for log_part, step in zip(log_parts, steps, strict=True):
        partner = 1.0
        if log_part is not None:
            partner = _norm_from_transform(
                np.exp(np.minimum(log_size - log_part, _LOG_SIZE_MAX)), size
            )
        own = math.sqrt(float((step.mass * step.mass).sum()))
        error += step.count * (eta * own * partner + 8 * eps * total_norm)
    doubles = mass.astype(float)
    return doubles, error + float(np.abs(doubles - mass).max())


def _transform(
    steps: Sequence[LatticeMasses], size: int, number: type[np.floating], *, keep: bool = True
) -> tuple[Array, list[Array | None], Array]:
    """Return the product of the steps' FFTs (log-modulus, angle), and each FFT's log-modulus.

    The factors' are None if they need not be kept.
    """
    log_size, angle = np.zeros((2, size // 2 + 1), number)
    log_parts: list[Array | None] = []
    for step in steps:
        check_time()
        transform = fft.rfft(fold_modulo(step.mass.astype(number), size))
        log_part = np.log(np.maximum(np.abs(transform), _UNDERFLOW))
        log_parts.append(log_part if keep else None)
        log_size += step.count * log_part
        angle += step.count * np.angle(transform)
    return log_size, log_parts, angle


def _invert(
    log_size: Array, angle: Array, steps: Sequence[LatticeMasses], first: int, size: int
) -> Array:
    """Compute the inverse FFT of a log-modulus and angle; return `size` masses from `first` on."""
    shift = (sum(step.first * step.count for step in steps) - first) % size
    inverse: Array = np.roll(fft.irfft(np.exp(log_size + 1j * angle), size), shift)
    return inverse


def coarsen(step: LatticeMasses, spacing: float) -> tuple[Array, Array]:
    """Merge neighbouring loss grid points so that no exponential moment decreases.

    Neighbouring points form at most `BLOCKS_MAX` blocks. A block's mass moves to its two ends with
    its mean kept, which by convexity of e^{rl} can only raise a moment, and only to second order.
    """
    points = len(step.mass)
    block = -(-points // BLOCKS_MAX)
    starts = np.arange(0, points, block)
    losses = lattice_points(step.first, points, spacing)
    mass = np.add.reduceat(step.mass, starts)
    low, high = losses[starts], losses[np.minimum(starts + block, points) - 1]
    offset = np.add.reduceat(step.mass * (losses - np.repeat(low, block)[:points]), starts)
    upward = np.clip(offset / np.maximum(high - low, spacing), 0.0, mass)
    ends, masses = np.concatenate([low, high]), np.concatenate([mass - upward, upward])
    return ends[masses > 0], masses[masses > 0]


def _norm_from_transform(transform: Array, size: int) -> float:
    """Return the 2-norm of a real sequence, given the first half of its Fourier transform."""
    return math.sqrt(2 * float((np.abs(transform) ** 2).sum()) / size)


def fold_modulo(mass: Array, size: int) -> Array:
    """Return `size` masses, each the sum of the masses whose indices are equal modulo `size`."""
    # np.pad takes several times as long
    padded = np.zeros(len(mass) + -len(mass) % size, mass.dtype)
    padded[: len(mass)] = mass
    folded: Array = padded.reshape(-1, size).sum(axis=0)
    return folded
