"""Exact noise: integers with the law of a rounded Gaussian, added to a sum on a grid.

A clipped sum S is rounded to a grid of step g, a power of two: m = rint(S/g). Independent integers
N with

    P(N = k) = Φ((k + ½)/s) − Φ((k − ½)/s)

are added to it. Rounding commutes with shifts by integers, so m + N has exactly the law of
rint(m + sZ): it is computed from the output of a Gaussian mechanism with centre m and deviation s,
and every bound that holds for that mechanism holds for this one. If one record moves S by at most
Δ, it moves m by at most Δ/g + √d over d coordinates. So s·g = σ·(Δ + g·√d) keeps the noise
multiplier σ. What follows, the product with g and any rounding of it, is post-processing.

PyTorch's own generators end at a few deviations (5.77 on a CPU in single precision), and what is
impossible without a record has infinite loss. Here no output is impossible.

**Drawing.** 64 bits of an AES-256-CTR keystream are a sign and the first 63 bits of a uniform y;
|N| = rint(s·h(y)), where P(|Z| > h(y)) = y. A table has h's Taylor polynomials on 32 octaves of 64
intervals, with a bound on the error of what double precision makes of each (`_make_table`). Where
s·h is nearer to a half-integer than that, and for y < 2⁻³², ball arithmetic decides, with as many
further bits as it takes (`_resolve`). So the law is exact, if the keystream is uniform.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy import floor, rint

from training_client.private_step.kernels.compiled import compile_and_keep
from training_client.private_step.keystream import BLOCK, Array, read_keystream

_RECORD_BITS: Final = 28  # Δ, or the noise if it is less, is 2**28 steps: up to d = 10⁹ g·√d is
# at most 1.2e-4 of Δ
_NOISE_MAX: Final = 64.0  # times Δ; of more noise the table would leave too many draws open
_SUM_BITS: Final = 48  # the sum of the expected number of records is 2**48 steps at most
_COUNT_STEP: Final = 2.0**-20
LARGEST: Final = float(1 << 51)  # of |m|: clamping is a projection, which moves nothing apart
_OCTAVES: Final = 32
_PARTS_BITS: Final = 6  # an octave has 2**6 intervals
_DEGREE: Final = 6
_ROWS: Final = _OCTAVES << _PARTS_BITS
_UNREAD_BITS: Final = 11  # of the word, on which the table does not depend
_PRECISION: Final = 200  # bits of the balls that the table is computed in
_CHUNK: Final = 1024  # coordinates whose polynomials are evaluated together
# the same as numbers that the compiled loop reads
_READ_BITS_OF_WORD: Final = np.uint64((1 << 63) - (1 << _UNREAD_BITS))
_MIDDLE_OF_UNREAD: Final = np.uint64(1 << (_UNREAD_BITS - 1))
_VARIABLE_BITS: Final = np.uint64(52 - _PARTS_BITS)  # of a double's 52 digits
_VARIABLE: Final = np.uint64((1 << (52 - _PARTS_BITS)) - 1)
_VARIABLE_ZERO: Final = 1 << (51 - _PARTS_BITS)
_FIRST_ROW: Final = np.uint64((1023 + 63 - _OCTAVES) << _PARTS_BITS)
_LAST_ROW: Final = np.uint64(_ROWS)
_PRECISION_LOCK: Final = threading.RLock()  # flint has one precision for all threads


@dataclass(frozen=True, slots=True)
class NoiseGrid:
    """The grid that a sum is rounded to, and the deviation of the noise on it.

    Attributes:
        step: g, a power of two.
        deviation: s, the noise's standard deviation in steps of the grid before it is rounded.
    """

    step: float
    deviation: float

    @classmethod
    def for_sum(
        cls, noise_multiplier: float, sensitivity: float, coordinates: int, records: float
    ) -> NoiseGrid:
        """Return a grid whose noise keeps a noise multiplier, the rounding of the sum included.

        Args:
            noise_multiplier: σ.
            sensitivity: Δ, how far one record moves the sum at most, in the Euclidean norm.
            coordinates: d, of the whole release.
            records: about how many are added up. The sum of 8 times as many fits on the grid; what
                is beyond is clamped.
        """
        share = max(min(1.0, noise_multiplier), noise_multiplier / _NOISE_MAX)
        share = math.ldexp(share, -_RECORD_BITS)
        step = _power_of_two_below(sensitivity * max(share, math.ldexp(records, -_SUM_BITS)))
        moved = Fraction(sensitivity) / Fraction(step) + math.isqrt(coordinates) + 1
        return cls(step, math.nextafter(float(Fraction(noise_multiplier) * moved), math.inf))

    @classmethod
    def for_count(cls, deviation: float) -> NoiseGrid:
        """Return a grid for a whole number, which rounding to the grid leaves as it is."""
        return cls(_COUNT_STEP, deviation / _COUNT_STEP)

    @property
    def noise_deviation(self) -> float:
        """The standard deviation of the noise, in units of the sum."""
        return self.deviation * self.step

    def add_noise(self, total: torch.Tensor, factor: float, key: bytes) -> None:
        """Overwrite a sum with (its rounding to the grid + noise)·`factor`.

        Args:
            total: a sum in single or double precision, all of which is overwritten.
            factor: a public number.
            key: 32 random bytes, which no other noise is drawn with.
        """
        if total.is_cpu and total.is_contiguous() and total.dtype in (torch.float32, torch.float64):
            _draw(total.detach().reshape(-1).numpy(), self.step, factor, self.deviation, key)
            return
        noisy = self.round(total)
        noisy += self.draw_like(noisy, key)
        total.copy_(noisy.mul_(self.step * factor))

    def round(self, total: torch.Tensor, shares: int = 1) -> torch.Tensor:
        """Return a sum in steps of the grid: whole numbers in double precision; NaN counts as 0.

        Args:
            total: the sum.
            shares: how many such sums will be added up, which must be exact.
        """
        steps, most = total.to(torch.float64).mul(1 / self.step).round_(), LARGEST / shares
        return steps.nan_to_num_(0.0, most, -most).clamp_(-math.floor(most), math.floor(most))

    def draw_like(self, steps: torch.Tensor, key: bytes) -> torch.Tensor:
        """Return noise N in the shape and on the device of a tensor, as whole numbers in double."""
        drawn = np.zeros(steps.numel())
        _draw(drawn, 1.0, 1.0, self.deviation, key)
        return torch.from_numpy(drawn).reshape(steps.shape).to(steps.device)


def _power_of_two_below(step: float) -> float:
    """Return the largest power of two that is at most `step`, if its inverse is finite too."""
    found = math.ldexp(0.5, math.frexp(step)[1]) if math.isfinite(step) else 0.0
    if not found > 0 or not math.isfinite(1 / found):
        raise ValueError(f"a grid of step {step!r} is outside the range of doubles")
    return found


def _draw(flat: Array, step: float, factor: float, deviation: float, key: bytes) -> None:
    """Overwrite each number t by (rint(t/`step`) + N)·`step`·`factor`."""
    buffers = _buffers()
    for number, start in enumerate(range(0, flat.size, BLOCK)):
        part = flat[start : start + BLOCK]
        words = read_keystream(key, number, len(part), buffers.words)
        left = _fast_loop()(
            words, part, 1 / step, step * factor, deviation, _make_table(), buffers.chunk,
            buffers.places,
        )  # fmt: skip
        for place in buffers.places[:left].tolist():
            word, more = int(words[place]), _FurtherBits(key, start + place)
            size = _resolve(word & ((1 << 63) - 1), 63, deviation, more)
            m = float(rint(float(part[place]) / step))
            m = min(max(m, -LARGEST), LARGEST) if m == m else 0.0
            part[place] = (m + (-size if word >> 63 else size)) * (step * factor)


# --- the table, and what reads it


@cache
def _make_table() -> Array:
    """Return a row of eight numbers for each interval of y, from the smallest y on.

    The first seven are the Taylor coefficients aⱼ of h at the interval's middle, for a variable
    from −2⁴⁵ to 2⁴⁵. The last bounds the error of h as Horner's rule computes it in doubles, with
    or without fused products. The row after the last has the bound ∞.

    h is completely monotone, as dⁿ/dpⁿ Q⁻¹(p) = (−1)ⁿ Pₙ(h)/φ(h)ⁿ with P₁ = 1 and
    Pₙ₊₁ = Pₙ′ + n·x·Pₙ, which have no negative coefficients, shows. So the remainder of the degree
    6 is largest where the seventh derivative is: at the left end. What the unread bits of the word
    move h by is at most h′ there times 2⁻⁵³. Horner's rule loses at most 2⁻⁵³·(4·6 + 2)·Σ|aⱼ|
    (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, §5.1, with room), and the
    product with s, and the tests of it, four roundings more.
    """
    from flint import arb, ctx

    table = np.zeros((_ROWS + 1, _DEGREE + 2))
    table[_ROWS, -1] = math.inf
    polynomials = _derivative_polynomials(_DEGREE + 1)
    with _PRECISION_LOCK, ctx.workprec(_PRECISION):
        for row in range(_ROWS):
            octave, part = divmod(row, 1 << _PARTS_BITS)
            scale = arb(2) ** (octave - _OCTAVES)
            half = scale / (2 << _PARTS_BITS)
            left = scale * (1 + arb(part) / (1 << _PARTS_BITS))
            at_left = _derivatives(left, polynomials)
            exact = [
                value * half**n / math.factorial(n)
                for n, value in enumerate(_derivatives(left + half, polynomials)[:-1])
            ]
            rounded = [float(each.mid()) for each in exact]
            error = abs(at_left[-1]) * half ** (_DEGREE + 1) / math.factorial(_DEGREE + 1)
            error += abs(at_left[1]) * arb(2) ** (_UNREAD_BITS - 1 - 63)
            for value, double in zip(exact, rounded, strict=True):
                error += abs(value - arb(double))
                error += abs(arb(double)) * (4 * _DEGREE + 6) * arb(2) ** -53
            upper = math.nextafter(float(error.upper()), math.inf)
            scaled = [math.ldexp(double, -45 * n) for n, double in enumerate(rounded)]  # exact
            table[row] = *scaled, upper
    return table.ravel()


def _derivative_polynomials(count: int) -> list[list[int]]:
    """Return the coefficients of P₁ … P_`count`, of `_make_table`."""
    found = [[1]]
    for n in range(1, count):
        following = [0, *(n * each for each in found[-1])]
        for power, coefficient in enumerate(found[-1][1:], start=1):
            following[power - 1] += power * coefficient
        found.append(following)
    return found


def _derivatives(y: Any, polynomials: list[list[int]]) -> list[Any]:
    """Return balls around h and its derivatives at y, where y = 2p."""
    from flint import arb

    h = arb(2).sqrt() * y.erfcinv()
    slope = (arb.pi() / 2).sqrt() * (h * h / 2).exp()  # 1/(2φ(h))
    found = [h]
    for n, polynomial in enumerate(polynomials, start=1):
        value = arb(0)
        for coefficient in reversed(polynomial):
            value = value * h + coefficient
        found.append((-slope) ** n * value)
    return found


@cache
def _fast_loop() -> Callable[..., int]:
    """Return the compiled `_overwrite`. Its roundings are those that the table's bounds allow."""
    return compile_and_keep(_overwrite)


def _overwrite(
    words: Array,
    total: Array,
    inverse: float,
    unit: float,
    deviation: float,
    table: Array,
    chunk: Array,
    places: Array,
) -> int:
    """Overwrite each t in `total` by (rint(t·`inverse`) + N)·`unit`; return how many are left.

    Those left are unchanged; `places` has their indices.
    """
    bits, left, size = chunk.view(np.uint64), 0, len(chunk)
    for start in range(0, len(words), size):
        some, parts = words[start : start + size], total[start : start + size]
        for i in range(len(some)):  # the 52 bits that are read, and half of the rest: exact
            read = (some[i] & _READ_BITS_OF_WORD) | _MIDDLE_OF_UNREAD
            chunk[i] = np.float64(np.int64(read))
        for i in range(len(some)):
            # the exponent and the first six digits are the row; the other digits are the variable
            row = (bits[i] >> _VARIABLE_BITS) - _FIRST_ROW
            row = min(row, _LAST_ROW) << np.uint64(3)
            t = np.float64(np.int64(bits[i] & _VARIABLE) - _VARIABLE_ZERO)
            h = table[row + np.uint64(6)]
            h = h * t + table[row + np.uint64(5)]
            h = h * t + table[row + np.uint64(4)]
            h = h * t + table[row + np.uint64(3)]
            h = h * t + table[row + np.uint64(2)]
            h = h * t + table[row + np.uint64(1)]
            h = h * t + table[row]
            x = deviation * h
            k = floor(x + 0.5)
            if abs(x - k) < 0.5 - deviation * table[row + np.uint64(7)]:
                m = rint(np.float64(parts[i]) * inverse)
                m = min(max(m, -LARGEST), LARGEST) + 0.0 if m == m else 0.0  # never −0
                parts[i] = (m - k if some[i] >> np.uint64(63) else m + k) * unit
            else:
                places[left] = start + i
                left += 1
    return left


# --- the few draws that the table leaves open


def _resolve(v: int, count: int, deviation: float, more: Callable[[int], int]) -> int:
    """Return |N| for a uniform y whose first `count` bits are v; `more(n)` returns n further bits.

    h decreases, so the bits that are known leave open what lies between two values of it.
    """
    while True:
        if v:
            least = _rounded(v + 1, count, deviation)
            if least is not None and least == _rounded(v, count, deviation):
                return least
        v, count = (v << 64) | more(64), count + 64


def _rounded(numerator: int, count: int, deviation: float) -> int | None:
    """Return ⌊s·h(`numerator`/2^`count`) + ½⌋; None if the ball of it holds a whole number."""
    from flint import arb, ctx

    if numerator == 1 << count:
        return 0
    exact = Fraction(deviation)
    with _PRECISION_LOCK, ctx.workprec(count + 160):
        h = arb(2).sqrt() * (arb(numerator) / arb(1 << count)).erfcinv()
        found = (h * exact.numerator / exact.denominator + arb(1) / 2).floor().unique_fmpz()
        return None if found is None else int(found)


class _FurtherBits:
    """Further bits of one draw: a stream of its own, numbered by its place, above the blocks'."""

    def __init__(self, key: bytes, place: int) -> None:
        self._key, self._stream, self._used = key, (1 << 63) + place, 0

    def __call__(self, count: int) -> int:
        """Return the next `count` ≤ 64 bits."""
        self._used += 1
        return int(read_keystream(self._key, self._stream, self._used)[-1]) >> (64 - count)


class _Buffers(threading.local):
    """Buffers of one thread: the cipher frees the interpreter's lock while it fills them."""

    def __init__(self) -> None:
        self.words = bytearray(8 * BLOCK + 15)
        self.places, self.chunk = np.empty(BLOCK, np.int64), np.empty(_CHUNK)


@cache
def _all_buffers() -> _Buffers:
    return _Buffers()


def _buffers() -> _Buffers:
    """Return this thread's buffers."""
    return _all_buffers()
