"""Complex numbers with error bounds: each term of a bound is needed, and nearly attained.

The errors of inputs point where they hurt most. Errors of a transform are added to it: those of
SciPy are far smaller than what is proved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpc, mpf
from scipy import fft

from accountant_service.numerics.floats.complex_balls import (
    ComplexBalls,
    block_transforms,
    invert_transform,
    transform_masses,
)

EPS = float(np.finfo(float).eps)
COUNT = 400
ERROR = 1e-9  # of an input: far more than rounding, far less than 1
Operation = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def many_digits() -> Any:
    with mp.workdps(40):
        yield


def random_numbers(seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    modulus, angle = rng.uniform(0.5, 2, COUNT), rng.uniform(-np.pi, np.pi, COUNT)
    return np.array(modulus * np.exp(1j * angle))


def balls(values: np.ndarray[Any, Any], error: float) -> ComplexBalls:
    """Balls whose centres are computed, and whose true numbers are longer by the error."""
    return ComplexBalls(values, np.abs(values) * (1 + 2 * EPS) + error, np.full(COUNT, error))


def true_numbers(numbers: ComplexBalls) -> list[Any]:
    """Return the true numbers, each farther from 0 than the computed one by its error."""
    exact = [mpc(value) for value in numbers.value]
    return [z + mpf(e) * z / abs(z) for z, e in zip(exact, numbers.error, strict=True)]


def shares_of_bounds(found: ComplexBalls, exact: list[Any]) -> list[Any]:
    """Return each distance from the exact number over its bound, and compare the sizes."""
    for value, size, truth in zip(found.value, found.size, exact, strict=True):
        assert max(abs(mpc(value)), abs(truth)) <= mpf(size) * (1 + mpf(10) ** -14)
    pairs = zip(found.value, found.error, exact, strict=True)
    return [abs(mpc(value) - truth) / mpf(error) for value, error, truth in pairs]


@pytest.mark.spread(first=4)
@pytest.mark.parametrize("operation", [lambda a, b: a * b, lambda a, b: a + b], ids=["*", "+"])
@pytest.mark.parametrize(("first", "second"), [(ERROR, 0.0), (0.0, ERROR), (ERROR, ERROR)])
def test_the_errors_of_both_inputs_reach_a_product_and_a_sum(
    operation: Operation, first: float, second: float
) -> None:
    a, b = balls(random_numbers(1), first), balls(random_numbers(2), second)
    if operation(2, 3) == 5:
        b = balls(a.value * np.abs(b.value), second)  # all of an error counts in one direction
    exact = [operation(x, y) for x, y in zip(true_numbers(a), true_numbers(b), strict=True)]
    shares = shares_of_bounds(operation(a, b), exact)
    assert min(shares) >= 0.99
    assert max(shares) <= 1


@pytest.mark.parametrize("operation", [lambda a, b: a * b, lambda a, b: a + b], ids=["*", "+"])
def test_the_rounding_of_a_product_and_of_a_sum_is_counted(operation: Operation) -> None:
    a, b = balls(random_numbers(3), 0.0), balls(random_numbers(4), 0.0)
    exact = [operation(x, y) for x, y in zip(true_numbers(a), true_numbers(b), strict=True)]
    shares = shares_of_bounds(operation(a, b), exact)
    assert 0.1 <= max(shares) <= 1


@pytest.mark.parametrize(("error", "least"), [(ERROR, 0.99), (0.0, 0.02)])
def test_a_scaled_number_has_its_scaled_error_and_its_rounding(error: float, least: float) -> None:
    a, factor = balls(random_numbers(5), error), 0.1
    exact = [mpf(factor) * x for x in true_numbers(a)]
    assert least <= max(shares_of_bounds(a.scaled(factor), exact)) <= 1


@pytest.mark.parametrize(("error", "least"), [(ERROR, 0.99), (0.0, 0.01)])
@pytest.mark.parametrize("exponent", [1, 2, 7, 100])
def test_a_power_has_the_error_of_its_base_and_its_rounding(
    exponent: int, error: float, least: float
) -> None:
    a = balls(random_numbers(6), error)
    exact = [x**exponent for x in true_numbers(a)]
    assert least <= max(shares_of_bounds(a.power(exponent), exact)) <= 1


def test_a_power_of_zero_is_one_and_a_power_of_nearly_nothing_is_within_its_bound() -> None:
    one = balls(random_numbers(7), ERROR).power(0)
    assert (one.value == 1).all()
    assert (one.error == 0).all()
    nothing = ComplexBalls(np.zeros(1, complex), np.array([ERROR]), np.array([ERROR]))
    assert ERROR**3 <= nothing.power(3).error[0] <= 4 * ERROR**3


def exact_transform(mass: np.ndarray[Any, Any], size: int) -> list[Any]:
    """Return the first half of the transform, by its definition."""
    numbers = [mpf(float(m)) for m in mass]
    return [
        mp.fsum(m * mp.expjpi(-mpf(2 * j * k % (2 * size)) / size) for j, m in enumerate(numbers))
        for k in range(size // 2 + 1)
    ]


@pytest.mark.parametrize(("offset", "stride"), [(0, 1), (5, 1), (4, 4), (60, 2)])
def test_masses_at_every_nth_index_from_an_offset(offset: int, stride: int) -> None:
    mass = np.random.default_rng(9).dirichlet(np.ones(15))
    spread = np.zeros(offset + stride * len(mass))
    spread[offset::stride] = mass
    found = transform_masses(mass, 64, offset, stride, 10)
    exact = exact_transform(spread, 64)[:10]
    assert len(found.value) == 10
    for value, error, size, truth in zip(found.value, found.error, found.size, exact, strict=True):
        assert abs(mpc(value) - truth) <= mpf(error)
        assert abs(truth) <= mpf(size)


MASSES = np.random.default_rng(8).dirichlet(np.ones(100))


@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_error_of_folding_and_of_a_transform_are_counted(
    size: int, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are off by all that is proved, in one direction; the size covers the true modulus."""
    exact = exact_transform(MASSES, size)
    proved, folds = 3 * EPS * np.log2(size), 1 + len(MASSES) // size
    phases = np.array([complex(z / abs(z)) for z in exact])
    off = 0.95 * (proved + folds * EPS)  # the exact numbers are rounded, too

    def transform(folded: Any) -> Any:
        assert len(folded) == size
        return np.array([complex(z) for z in exact]) + sign * off * phases

    monkeypatch.setattr(fft, "rfft", transform)
    found = transform_masses(MASSES, size)
    pairs = list(zip(found.value, found.error, found.size, exact, strict=True))
    assert all(abs(mpc(v) - truth) <= mpf(e) for v, e, _, truth in pairs)
    assert all(abs(truth) <= mpf(s) for _, _, s, truth in pairs)
    assert max(abs(mpc(v) - truth) / mpf(e) for v, e, _, truth in pairs) >= 0.9


def test_the_size_of_a_number_computed_as_zero_covers_the_true_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal masses, but for 1e-16: all frequencies but the first are 1e-16, and 0 is computed."""
    mass = np.full(64, 1 / 64)
    mass[0] += 1e-16
    truth = float(abs(exact_transform(mass, 64)[5]))
    assert truth > 5e-17
    monkeypatch.setattr(fft, "rfft", lambda _: np.zeros(33, complex))
    found = transform_masses(mass, 64)
    assert found.error[5] >= truth
    assert found.size[5] >= truth


def test_a_transform_of_masses_that_underflow_is_within_its_bound() -> None:
    tiny = np.full(3, 5e-324)
    found = transform_masses(tiny, 8)
    for value, error, truth in zip(found.value, found.error, exact_transform(tiny, 8), strict=True):
        assert abs(mpc(value) - truth) <= mpf(error)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_error_of_inputs_and_of_the_inverse_transform_are_counted(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse is off by all that is proved; the input's error is all at one frequency."""
    size = 64
    mass = np.resize(MASSES, size)
    value = np.fft.rfft(mass)
    error = np.where(np.arange(len(value)) == 5, ERROR * share, 0.0)
    given = ComplexBalls(value, np.abs(value) + error, error)
    proved = 3 * EPS * np.log2(size)
    moduli = [*given.size, *given.size[1:-1]]  # of all frequencies: the others are conjugates
    off = 0.999 * proved * sum(moduli) / size
    inverse = fft.irfft

    def transform(values: Any, count: int) -> Any:
        return inverse(values, count) + off

    monkeypatch.setattr(fft, "irfft", transform)
    found, bound = invert_transform(given, size)
    direction = np.exp(2j * np.pi * 5 * np.arange(size) / size)
    truth = mass - np.real(direction) * 2 * ERROR * share / size  # of one possible true transform
    distance = float(np.abs(found - truth).max())
    assert 0.45 * bound <= distance <= bound


@pytest.mark.parametrize("block", [1, 2, 16])
@pytest.mark.parametrize("decay", [0.0, 0.03, -0.05])
def test_the_transforms_of_blocks(block: int, decay: float) -> None:
    """Both are the sums that the docstring states, within their errors."""
    size, frequencies = 256, 20
    found = block_transforms(size, frequencies, block, decay)
    with mp.workdps(40):
        for k in range(frequencies):
            w = mp.exp(-mpf(decay) + 2j * mp.pi * k / size)
            exact = [mp.fsum(w**d for d in range(block)),
                     mp.fsum(mpf(d) / block * w**d for d in range(block))]  # fmt: skip
            for balls_of, truth in zip(found, exact, strict=True):
                error = mpf(float(balls_of.error[k]))
                assert abs(mpc(balls_of.value[k]) - truth) <= error
                assert abs(truth) <= mpf(float(balls_of.size[k]))
                assert error <= 1e-13 * block


@pytest.mark.parametrize("count", [16, 64, 256])
def test_equally_spaced_masses_from_low_frequencies(count: int) -> None:
    size, kept = 256, 12
    value = np.zeros(size // 2 + 1, complex)
    value[:kept] = np.fft.rfft(np.resize(MASSES, size))[:kept]
    whole = np.fft.irfft(value, size)
    low = ComplexBalls(value[:kept], np.abs(value[:kept]), np.zeros(kept))
    found, error = invert_transform(low, size, count)
    assert len(found) == count
    assert np.abs(found - whole[:: size // count]).max() <= error
