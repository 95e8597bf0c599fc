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
    """Complex numbers, each with an upper bound on its error.

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

    def scaled(self, factor: float) -> ComplexBalls:
        """Return the numbers multiplied by a positive factor, with bounds on their errors."""
        size = factor * self.size
        return ComplexBalls(factor * self.value, size, factor * self.error + 4 * _EPS * size)

    def power(self, exponent: int) -> ComplexBalls:
        """Return the numbers raised to a whole power, with bounds on their errors.

        The exponent times the log is off by a few eps of itself, and as much is the power,
        relatively.
        """
        if exponent == 0:
            one = np.ones_like(self.size)
            return ComplexBalls(one.astype(complex), one, np.zeros_like(one))
        log_modulus = np.log(np.maximum(np.abs(self.value), _UNDERFLOW))
        value = np.exp(exponent * (log_modulus + 1j * np.angle(self.value)))
        less = np.exp((exponent - 1) * np.log(self.size))
        size = less * self.size
        rounding = 8 * _EPS * exponent * (1 + np.abs(log_modulus))
        return ComplexBalls(value, size, exponent * less * self.error + rounding * size)


def transform_masses(mass: Array, size: int) -> ComplexBalls:
    """Return the first half of the FFT of `mass`, wrapped around to the length `size`."""
    value = fft.rfft(fold_modulo(mass, size))
    folds = 1 + len(mass) // size
    error = (_transform_error(size) + folds * _EPS) * float(mass.sum()) * _ROOM + _UNDERFLOW
    return ComplexBalls(
        value, np.abs(value) * _ROOM + error + _UNDERFLOW, np.full(len(value), error)
    )


def invert_transform(balls: ComplexBalls, size: int) -> tuple[Array, float]:
    """Return the masses that have this FFT, and an upper bound on the error of each."""
    errors = balls.error + _transform_error(size) * balls.size
    return fft.irfft(balls.value, size), 2 * float(errors.sum()) / size * _ROOM + _UNDERFLOW


def _transform_error(size: int) -> float:
    """Return an upper bound on the relative error of an FFT of `size` points, a power of two."""
    return 3 * _EPS * math.log2(size)
