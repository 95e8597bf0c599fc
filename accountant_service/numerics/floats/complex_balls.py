"""Arrays of complex numbers with a proved bound on the error of each, and their transforms.

**Transforms.** Each output of a transform of 2^n points is a sum of the inputs, each times n
factors of modulus 1. A step is a multiplication by such a factor, itself rounded, which is off by
(√5 + 1)·eps/2, and an addition: less than 2.2·eps a step, and η = 3·eps·n leaves room. So an output
is off by at most η times the sum of the inputs' moduli. For the inverse transform, which is divided
by 2^n, that is η times the mean modulus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import fft

from accountant_service.numerics.floats.convolution import fold_modulo
from accountant_service.numerics.floats.special_functions import Array, ComplexArray

_EPS: Final = float(np.finfo(float).eps)
_UNDERFLOW: Final = 1e-300  # more than all that underflows
_ROOM: Final = 1 + 1e-6  # for the rounding of error bounds


@dataclass(frozen=True, slots=True)
class ComplexBalls:
    """Complex numbers, each with an upper bound on its absolute error (ball arithmetic).

    Attributes:
        value: the computed numbers.
        size: upper bounds of the moduli of the computed numbers and of the true ones.
        error: upper bounds of the distance of the two.
    """

    value: ComplexArray
    size: Array
    error: Array

    def __mul__(self, other: ComplexBalls) -> ComplexBalls:
        """Return the products of two arrays, element by element, with bounds on their errors."""
        size = self.size * other.size
        error = self.error * other.size + self.size * other.error + 4 * _EPS * size
        return ComplexBalls(self.value * other.value, size, error)

    def __add__(self, other: ComplexBalls) -> ComplexBalls:
        """Return the sums of two arrays, element by element, with bounds on their errors."""
        size = self.size + other.size
        return ComplexBalls(
            self.value + other.value, size, self.error + other.error + 2 * _EPS * size
        )

    def lowest(self, count: int) -> ComplexBalls:
        """Return the first `count` numbers: a transform's lowest frequencies."""
        return ComplexBalls(self.value[:count], self.size[:count], self.error[:count])

    def scaled(self, factor: float) -> ComplexBalls:
        """Return the numbers multiplied by a positive factor, with bounds on their errors."""
        size = factor * self.size
        return ComplexBalls(factor * self.value, size, factor * self.error + 4 * _EPS * size)

    def power(self, exponent: int) -> ComplexBalls:
        """Return the numbers raised to a whole power, with bounds on their errors.

        The exponent times the log is off by a few eps of itself, and as much is the power,
        relatively. Angles of up to π may be off by 4 units in the last place.
        """
        if exponent == 0:
            one = np.ones_like(self.size)
            return ComplexBalls(one.astype(complex), one, np.zeros_like(one))
        log_modulus = np.log(np.maximum(np.abs(self.value), _UNDERFLOW))
        value = np.exp(exponent * (log_modulus + 1j * np.angle(self.value)))
        less = np.exp((exponent - 1) * np.log(self.size))
        size = less * self.size
        rounding = 24 * _EPS * exponent * (1 + np.abs(log_modulus))
        return ComplexBalls(value, size, exponent * less * self.error + rounding * size)


def transform_masses(
    mass: Array, size: int, offset: int = 0, stride: int = 1, frequencies: int | None = None
) -> ComplexBalls:
    """Return the FFT of probabilities, folded modulo `size`, at frequencies 0 to `size`/2.

    Args:
        mass: at every `stride`-th index from `offset` on; elsewhere it is 0.
        size: number of points, a power of two.
        offset: index of the first mass.
        stride: distance of the indices of neighbouring masses.
        frequencies: number of the lowest frequencies to return; all if not given.
    """
    value = fft.rfft(_fold(mass, size, offset, stride))[:frequencies]
    folds = 1 + (offset + stride * len(mass)) // size
    error = (_transform_error(size) + folds * _EPS) * float(mass.sum()) * _ROOM + _UNDERFLOW
    return ComplexBalls(
        value, np.abs(value) * _ROOM + error + _UNDERFLOW, np.full(len(value), error)
    )


def _fold(mass: Array, size: int, offset: int, stride: int) -> Array:
    """Return `size` masses: those with equal indices modulo `size` are added."""
    end = offset + stride * len(mass)
    spread = np.zeros(max(end, size))
    spread[offset:end:stride] = mass
    return fold_modulo(spread, size) if end > size else spread


def invert_transform(
    balls: ComplexBalls, size: int, count: int | None = None
) -> tuple[Array, float]:
    """Invert an FFT: return `count` evenly spaced values out of `size`, and an error bound.

    Args:
        balls: the transform at the lowest frequencies; at the others, up to `size`/2, it is 0.
        size: number of masses, a power of two.
        count: number of masses to return, a power of two; all if not given.

    Returns:
        Every (`size`/`count`)-th mass from the first one on, and an upper bound on the error of
        each.
    """
    count = count or size
    points = min(size, max(count, 1 << (2 * len(balls.value) - 1).bit_length()))
    errors = balls.error + _transform_error(points) * balls.size
    mass = fft.irfft(balls.value, points) * (points / size)
    return mass[:: points // count], 2 * float(errors.sum()) / size * _ROOM + _UNDERFLOW


def block_transforms(
    size: int, frequencies: int, block: int, decay: float
) -> tuple[ComplexBalls, ComplexBalls]:
    """Return transforms of two filters: the sum of a block's points, equally or linearly weighted.

    They are S = Σ w^d and U = Σ (d/block)·w^d over d from 0 to block − 1, with
    w = e^{−decay + 2πik/size} at the frequency k. Both are computed by doubling the block.

    Args:
        size: number of points, a power of two.
        frequencies: number of frequencies, from 0 on.
        block: number of points of a block, a power of two.
        decay: logarithm of the ratio of the weights of neighbouring points.
    """
    one = np.ones(frequencies)
    plain = ComplexBalls(one.astype(complex), one, 0 * one)
    moment = ComplexBalls(np.zeros(frequencies, complex), 0 * one, 0 * one)
    length = 1
    while length < block:
        turns = np.arange(frequencies) * length % size / size
        modulus = math.exp(-decay * length) * one
        rounding = 16 * _EPS * (1 + abs(decay) * length)
        shift = ComplexBalls(
            (modulus * np.exp(2j * math.pi * turns)).astype(complex),
            modulus * (1 + rounding),
            modulus * rounding,
        )
        moment = moment + shift * (moment + plain.scaled(length))
        plain = plain + shift * plain
        length *= 2
    return plain, moment.scaled(1 / block)


def _transform_error(size: int) -> float:
    """Return an upper bound on the relative error of an FFT of `size` points, a power of two."""
    return 3 * _EPS * math.log2(size)
